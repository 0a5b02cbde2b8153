"""Weights go to transformers and back."""

from dataclasses import replace

import pytest
import torch

from penstock.errors import PlanError
from penstock.train import GPT, ModelConfig, from_gpt2, gpt2_config, to_gpt2

SHAPE = ModelConfig(layers=3, heads=4, width=64, length=48, vocab_size=301)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = GPT(SHAPE)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)  # biases and norms, too
    return model.eval()


@pytest.fixture
def tokens():
    return torch.randint(301, (2, 48), generator=torch.Generator().manual_seed(2))


def test_there_and_back_is_the_same_model(model, tokens):
    again = from_gpt2(to_gpt2(model), heads=4).eval()

    assert replace(again.config, dropout=0.0) == SHAPE
    with torch.no_grad():
        assert torch.equal(model(tokens), again(tokens))


def test_the_ends_of_a_text_are_ids_that_the_model_has():
    assert gpt2_config(SHAPE)["eos_token_id"] is None
    assert gpt2_config(replace(SHAPE, vocab_size=50_257))["eos_token_id"] == 50_256


def test_matrices_are_transposed_and_the_padding_is_left_out(model):
    given = to_gpt2(model)

    assert given["transformer.wte.weight"].shape == (301, 64)
    assert given["transformer.h.2.mlp.c_fc.weight"].shape == (64, 256)
    assert given["lm_head.weight"] is given["transformer.wte.weight"]


def test_transformers_computes_the_same_logits(model, tokens):
    """To 1e-5 of logits of about 10."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2_config(SHAPE))).eval()
    missing = theirs.load_state_dict(to_gpt2(model), strict=False)

    with torch.no_grad():
        found, right = model(tokens), theirs(tokens).logits
    assert not missing.unexpected_keys
    assert right.abs().max() > 1
    assert torch.allclose(found, right, atol=1e-5, rtol=1e-5)

    back = from_gpt2(theirs.state_dict(), heads=4).eval()
    with torch.no_grad():
        assert torch.equal(back(tokens), found)


@pytest.mark.parametrize(
    "options",
    [{"positions": "rotary"}, {"activation": "relu2"}, {"norm": "rms"}, {"bias": False}],
    ids=str,
)
def test_what_gpt2_does_not_have_is_refused(options):
    (spelled,) = (f"{name}={value!r}" for name, value in options.items())

    with pytest.raises(PlanError, match=f"GPT-2 has no {spelled}"):
        to_gpt2(GPT(replace(SHAPE, **options)))
