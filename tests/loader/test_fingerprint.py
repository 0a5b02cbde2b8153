"""A number for what a batch holds, whoever holds which part of it."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader import BatchFormat
from penstock.loader.dataloader import log_fingerprints, read_log
from penstock.loader.loader import Loader
from penstock.loader.state import of_samples, of_tokens
from penstock.order.plan import Plan
from penstock.rows.windows import Windows


def fingerprints(loader):
    return [loader.fingerprint for _ in loader]


@pytest.mark.parametrize("kind", ["samples", "tokens"])
@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_the_sum_over_ranks_is_that_of_one_process(store, kind, tail):
    def run(rank, world_size):
        return fingerprints(
            Loader(
                Windows(store, 16, tail=tail),
                global_batch_size=12,
                rank=rank,
                world_size=world_size,
                format=BatchFormat(fingerprint=kind),
                epochs=2,
                drop_last=False,
                seed=7,
            )
        )

    alone = run(0, 1)
    assert len(set(alone)) == len(alone)
    for world_size in (2, 3, 4, 6):
        ranks = [run(rank, world_size) for rank in range(world_size)]
        assert [sum(step) % 2**64 for step in zip(*ranks, strict=True)] == alone


@given(
    place=st.integers(0, 8),
    token=st.integers(0, 2**32 - 1),
    other=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**62),
)
def test_one_other_token_is_always_seen(place, token, other, position):
    """Certain, not likely: weights are odd and the rest is a bijection."""
    row = np.arange(9, dtype="uint32")[None]
    row[0, place] = token
    changed = row.copy()
    changed[0, place] = other
    at = np.array([position])

    assert (of_tokens(row, None, at) == of_tokens(changed, None, at)).item() == (token == other)


def test_one_other_bit_is_always_seen():
    row = np.zeros((1, 1025), dtype="uint32")
    at = np.array([7])
    right = of_tokens(row, None, at)
    for place in range(0, 1025, 64):
        for bit in range(32):
            row[0, place] = 1 << bit
            assert of_tokens(row, None, at) != right
        row[0, place] = 0


@pytest.mark.parametrize("kind", ["samples", "tokens"])
def test_a_batch_that_was_filled_up_has_the_fingerprint_of_its_rows(numbered, kind):
    filled = Loader(numbered(5), 8, epochs=1, drop_last=False, format=BatchFormat(fingerprint=kind))
    alone = Loader(numbered(5), 1, epochs=1, format=BatchFormat(fingerprint=kind))

    assert fingerprints(filled) == [sum(fingerprints(alone)) % 2**64]


def test_a_row_has_the_same_value_beside_any_other(numbered):
    tokens = np.arange(20, dtype="uint16").reshape(2, 10)
    some = np.ones((2, 9), bool)
    some[1, 4:] = False
    at = np.array([5, 6])

    assert of_tokens(tokens, None, at)[0] == of_tokens(tokens, some, at)[0]
    assert of_tokens(tokens, None, at)[1] != of_tokens(tokens, some, at)[1]


@given(
    numbers=st.tuples(*[st.integers(0, 2**62)] * 3),
    others=st.tuples(*[st.integers(0, 2**62)] * 3),
    key=st.integers(0, 2**64 - 1),
)
def test_another_epoch_sample_or_position_is_another_value(numbers, others, key):
    def value(three):
        keys = np.array([key], np.uint64)
        return of_samples(keys, *(np.array([each], np.int64) for each in three)).item()

    assert (value(numbers) == value(others)) == (numbers == others)


def test_the_same_rows_at_other_places_are_another_batch(numbered):
    loaders = [Loader(numbered(64), 64, shuffle=shuffle) for shuffle in ("none", "full")]

    assert fingerprints_of_first(loaders[0]) != fingerprints_of_first(loaders[1])


def fingerprints_of_first(loader):
    next(iter(loader))
    return loader.fingerprint


def test_sources_are_told_apart_by_name(numbered):
    one, two = (Plan({name: numbered(9), "b": numbered(9)}, seed=1) for name in ("a", "c"))

    assert fingerprints_of_first(Loader(one, 8)) != fingerprints_of_first(Loader(two, 8))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_log_has_a_line_for_each_step_handed_out(numbered, tmp_path, prefetch):
    log = tmp_path / "logs" / "run.jsonl"
    loader = Loader(numbered(50), 8, prefetch=prefetch, steps=20)
    expected = []
    for _ in log_fingerprints(loader, log):
        expected.append(loader.fingerprint)
        if len(expected) == 5:
            break
    lines = [json.loads(line) for line in log.read_text().splitlines()]

    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["position"] for line in lines] == [8, 16, 24, 32, 40]
    assert [int(line["fingerprint"], 16) for line in lines] == expected
    # Another run goes on with the same file; steps that are repeated count once.
    again = Loader(numbered(50), 8, prefetch=prefetch, steps=20)
    again.seek(32)
    expected = expected[:4] + [again.fingerprint for _ in log_fingerprints(again, log)]
    assert [int(each, 16) for each in read_log(log).values()] == expected
    assert list(read_log(log)) == [8 * step for step in range(1, 21)]


def test_fingerprints_do_not_change_from_version_to_version():
    """A log of one run is compared with the log of another, which may be years older."""
    tokens = np.arange(24, dtype="uint32").reshape(2, 12) * 977
    targets = np.arange(22).reshape(2, 11) % 3 > 0
    at = np.array([5, 2**40])

    assert of_tokens(tokens, None, at).tolist() == [0x2A828E8F3AE1CA34, 0x2F6AD7443D930D84]
    assert of_tokens(tokens, targets, at).tolist() == [0x8FEAAAE79E3E9225, 0x82F6D3312F3D6A93]
    assert of_samples(np.array([1, 2], np.uint64), at, at + 1, at).tolist() == [
        0xD289A037F11C1F1D,
        0xCBDC8556BD6E04FE,
    ]
