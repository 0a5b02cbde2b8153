"""Many calls of one tokenizer at a time, and a fork in the midst of them."""

import copy
import multiprocessing
import queue
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pickle import dumps, loads

import numpy as np
import pyarrow as pa
import pytest

from penstock.tokenize import gigatoken as engines
from penstock.tokenize.compare import compare
from penstock.tokenize.engines import ByteEngine, TokenizersEngine
from penstock.tokenize.gigatoken import GigatokenEngine
from penstock.tokenize.tokenizer import load_tokenizer


@pytest.fixture
def engine(gpt2):
    return GigatokenEngine(gpt2.definition, parse=False)


def texts(number):
    words = [
        f"line {number} {each} of some text, {each * number}\n".encode() for each in range(999)
    ]
    return pa.array(words, pa.large_binary())


def test_many_calls_at_once_give_what_each_gives_alone(engine, monkeypatch):
    loads = []
    load = engines._load_gigatoken
    monkeypatch.setattr(engines, "_load_gigatoken", lambda text: loads.append(1) or load(text))
    alone = [engine.encode(texts(number)) for number in range(40)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(engine.encode, map(texts, range(40))))

    for one, other in zip(alone, together, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))
    assert len(loads) < engines._MAX_LOADED


def test_tokenizers_of_one_definition_share_an_engine_until_nobody_uses_it(gpt2):
    definition = replace(gpt2.definition, name="copy")
    one, other = load_tokenizer(definition), load_tokenizer(definition)
    parsed = load_tokenizer(definition, special_tokens="parse")

    assert one.engine is other.engine
    assert one.engine is not gpt2.engine
    assert parsed.engine is not one.engine
    assert parsed.encode("<|endoftext|>").tolist() == [50256]
    assert len(one.encode("<|endoftext|>")) > 1
    left = weakref.ref(one.engine)
    del one
    assert left() is not None
    del other
    assert left() is None


class Late(queue.SimpleQueue):
    """A queue that holds something more as soon as somebody waits for it."""

    def get(self):
        self.put(None)
        return super().get()


def test_calls_beyond_those_that_may_be_loaded_are_spread(engine):
    idle = Late()
    idle.put(engine._idle.get())
    engine._idle = idle
    with ExitStack() as lent:
        crowded = [lent.enter_context(engine._borrowed())[1] for _ in range(engines._MAX_LOADED)]
        fifth = lent.enter_context(engine._borrowed())[1]

    assert crowded == [False] * engines._MAX_LOADED
    assert fifth


@pytest.mark.parametrize("name", ["gigatoken", "tokenizers", "bytes"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda engine: loads(dumps(engine))])
def test_a_copy_of_an_engine_encodes_and_decodes_the_same(gpt2, name, copied):
    made = {"gigatoken": GigatokenEngine, "tokenizers": TokenizersEngine}.get(name)
    engine = made(gpt2.definition, parse=False) if made else ByteEngine()
    right = engine.encode(texts(3))
    assert engine.decode(right[0][:20])  # what was loaded for it stays behind
    copied = copied(engine)

    assert all(np.array_equal(*pair) for pair in zip(copied.encode(texts(3)), right, strict=True))
    assert copied.decode(right[0]) == engine.decode(right[0])
    assert copied.vocab_size == engine.vocab_size


@pytest.mark.skipif(sys.platform != "linux", reason="no fork")
def test_a_copy_of_an_engine_does_not_wait_after_a_fork_either(engine):
    copied = copy.deepcopy(engine)

    assert copied in engines._engines


def encode_and_tell(engine, found):
    with ExitStack() as lent:  # more than there may be where gigatoken's pool can be used
        for _ in range(engines._MAX_LOADED + 1):
            assert not lent.enter_context(engine._borrowed())[1]
        found.send([each.tolist() for each in engine.encode(texts(3))])


@pytest.mark.skipif(sys.platform != "linux", reason="no fork")
def test_a_forked_child_does_not_wait_for_what_was_lent_before(engine):
    right = [each.tolist() for each in engine.encode(texts(3))]
    ours, theirs = multiprocessing.Pipe()
    with ThreadPoolExecutor(16) as pool:  # so that the pool of gigatoken has threads
        list(pool.map(engine.encode, map(texts, range(40))))
    with ExitStack() as lent:
        for _ in range(engines._MAX_LOADED):
            lent.enter_context(engine._borrowed())
        child = multiprocessing.get_context("fork").Process(
            target=encode_and_tell, args=(engine, theirs), daemon=True
        )
        child.start()
    try:
        assert ours.poll(60), "the child waits"
        assert ours.recv() == right
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: loads(dumps(each))])
def test_special_tokens_are_text_to_a_copy_too(engine, copied):
    tokenizer = load_tokenizer("gpt2", engine=engine)
    text = "Hello <|endoftext|> world"
    ids = tokenizer.encode(text).tolist()
    array = pa.array([text.encode()], pa.large_binary())
    compare(tokenizer, array, 0)  # loads the reference, which would travel along
    other = copied(tokenizer)

    assert other.encode(text).tolist() == ids
    compare(other, array, 0)
