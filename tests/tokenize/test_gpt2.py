"""GPT-2's decoder gives the text of its tokenizer, without loading one."""

import numpy as np
import pytest

import penstock as ps
from penstock.errors import TokenizerError
from penstock.store.decoder import decoder_of
from penstock.tokenize.definition import GPT2_DIGEST, Gpt2Decoder, find_definition


@pytest.fixture(scope="module")
def decoder():
    return Gpt2Decoder()


def test_the_digest_is_that_of_the_tokenizer():
    assert find_definition("gpt2").digest == GPT2_DIGEST


def test_every_id_and_random_rows_decode_as_with_the_tokenizer(decoder):
    tokenizer = ps.load_tokenizer("gpt2")
    random = np.random.default_rng(0)

    for each in range(tokenizer.vocab_size):
        assert decoder.decode_bytes([each]) == tokenizer.decode_bytes([each])
    for size in (0, 1, 2, 50, 3_000):
        ids = random.integers(0, tokenizer.vocab_size, size)
        assert decoder.decode_bytes(ids) == tokenizer.decode_bytes(ids)
        assert decoder.decode(ids) == tokenizer.decode(ids)
        assert decoder.decode(ids, "ignore") == tokenizer.decode(ids, "ignore")


def test_ids_that_no_text_has_are_refused_as_by_the_tokenizer(decoder):
    tokenizer = ps.load_tokenizer("gpt2")
    for ids in ([50_257], [-100], [[1, 2]], [0.5]):
        with pytest.raises(TokenizerError) as ours:
            decoder.decode(ids)
        with pytest.raises(TokenizerError) as theirs:
            tokenizer.decode(ids)
        assert str(ours.value) == str(theirs.value)


def test_rows_of_a_store_are_decoded_without_the_tokenizer_if_it_is_gpt2(tmp_path):
    plain = ps.build(ps.Texts(["Straße ☂"]), tmp_path / "plain", tokenizer="gpt2")
    added = ps.build(
        ps.Texts(["Straße ☂"]),
        tmp_path / "added",
        tokenizer=ps.load_tokenizer("gpt2", add_tokens=["<|x|>"]),
    )

    assert isinstance(decoder_of(plain.manifest), Gpt2Decoder)
    assert not isinstance(decoder_of(plain.manifest, "gpt2"), Gpt2Decoder)
    assert not isinstance(decoder_of(added.manifest), Gpt2Decoder)
    for store in (plain, added):
        text = decoder_of(store.manifest).decode(store.document(0))
        assert text == store.decode(0) + "<|endoftext|>"
