"""Small tokenizers that are trained in a moment."""

import json

import pytest
import tokenizers

CORPUS = ["the cat sat on the mat", "the dog ate the cat", "naïve café, <|endoftext|>"] * 4


@pytest.fixture(scope="session")
def small():
    """A byte-level BPE of 300 tokens with one special and one ordinary added token, as JSON."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=298,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["[sep]"])
    return json.loads(tokenizer.to_str())


@pytest.fixture
def small_file(small, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(small))
    return path
