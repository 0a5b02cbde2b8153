"""Slow twins of the generator, in plain integers, and rows that are made of nothing."""

import numpy as np
import pytest

from penstock.digest import derive_key

GOLDEN = 0x9E3779B97F4A7C15
ALL = 2**64 - 1


class Slow:
    """The generator as its docstring says it, one number at a time."""

    @staticmethod
    def mix(number):
        number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & ALL
        number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & ALL
        return number ^ (number >> 31)

    def row_key(self, seed, source, *numbers):
        key = derive_key("transform", source, seed)
        for number in numbers:
            key = self.mix((key + number * GOLDEN) & ALL)
        return key

    def subkey(self, key, number):
        return self.mix((self.mix(key ^ 0xA0761D6478BD642F) + number * GOLDEN) & ALL)

    def draw(self, key, place):
        return self.mix((key + (place + 1) * GOLDEN) & ALL)

    def happens(self, key, place, rate):
        return (self.draw(key, place) >> 11) < round(rate * 2**53)

    def below(self, key, place, limit):
        number = self.draw(key, place)
        attempt = 0
        while number >= 2**64 // limit * limit:
            attempt += 1
            number = self.draw(self.subkey(key, attempt), place)
        return number % limit


class Made:
    """Rows of random tokens, in memory: the same for the same arguments."""

    def __init__(self, num_rows=40, length=12, *, vocab_size=50, seed=0, documents=False):
        generator = np.random.default_rng(seed)
        tokens = generator.integers(0, vocab_size, (num_rows, length + 1))
        self.fields = {"tokens": tokens.astype(np.uint16)}
        if documents:
            begins = generator.random((num_rows, length)) < 0.15
            self.fields["document_ids"] = np.cumsum(begins, axis=1, dtype=np.int32)
        self.length = length
        self.digest = f"made {num_rows} {length} {vocab_size} {seed}"
        self.num_tokens = num_rows * length

    def __len__(self):
        return len(self.fields["tokens"])

    def read(self, samples):
        return {name: values[samples] for name, values in self.fields.items()}


@pytest.fixture(scope="session")
def slow():
    return Slow()


@pytest.fixture(scope="session")
def made():
    return Made
