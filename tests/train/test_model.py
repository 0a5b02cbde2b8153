"""The model computes what its options say, and packed documents as if they were alone."""

from dataclasses import replace

import pytest
import torch

import penstock as ps
from penstock.errors import PlanError
from penstock.train import GPT, SIZES, ModelConfig, model_config
from penstock.train.model import _rotate

PLAIN = ModelConfig(layers=2, heads=2, width=32, length=64, vocab_size=257)
OPTIONS = [
    {},
    {"positions": "rotary"},
    {"qk_norm": True},
    {"activation": "relu2"},
    {"norm": "rms", "bias": False},
    {"tied": False},
]


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(257, (3, 40), generator=torch.Generator().manual_seed(1))


def made(**options):
    torch.manual_seed(0)
    return GPT(replace(PLAIN, **options))


def test_the_sizes_have_as_many_weights_as_their_names_say():
    with torch.device("meta"):
        counts = {
            name: sum(weight.numel() for weight in GPT(config).parameters())
            for name, config in SIZES.items()
        }

    padding = SIZES["124M"].padded_vocab - SIZES["124M"].vocab_size
    assert counts["124M"] == 124_439_808 + padding * 768  # GPT-2's own number, and tiles
    assert 350e6 < counts["350M"] < 360e6
    assert counts["nano"] < 8e6


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_token_sees_those_after_it(tokens, options):
    model = made(**options)
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % 257

    with torch.no_grad():
        before, after = model(tokens), model(changed)

    assert torch.allclose(before[:, :25], after[:, :25], atol=1e-6)
    assert not torch.allclose(before[:, 25:], after[:, 25:], atol=1e-3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_loss_is_the_sum_over_targets_that_count(tokens, options):
    model = made(**options)
    targets = tokens.clone()
    targets[0, :7] = -100

    with torch.no_grad():
        loss = model(tokens, targets)
        # The padding rows of the embedding take part in the softmax; logits leave them out.
        hidden = {}
        model.norm.register_forward_hook(lambda *each: hidden.update(out=each[2]))
        model(tokens)
        head = model.token_embedding.weight if model.head is None else model.head
        chances = (hidden["out"] @ head.T).log_softmax(-1)

    picked = [
        -chances[row, place, targets[row, place]]
        for row in range(3)
        for place in range(40)
        if targets[row, place] != -100
    ]
    assert len(picked) == 113
    assert loss.item() == pytest.approx(sum(picked).item(), rel=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_computing_activations_again_gives_the_same_gradients(tokens, options):
    grown = []
    for recompute in (False, True):
        model = made(**options)
        model.recompute = recompute
        model(tokens, tokens).backward()
        grown.append([weight.grad for weight in model.parameters()])

    assert all(torch.equal(one, two) for one, two in zip(*grown, strict=True))


def test_rotary_positions_turn_each_pair_of_channels_by_its_angle():
    """As a product of complex numbers: the halves are the real and the imaginary parts."""
    model = made(positions="rotary")
    length, size = model.config.length, model.config.width // model.config.heads
    heads = torch.randn(2, length, model.config.heads, size, generator=torch.manual_seed(3))
    speeds = 10_000.0 ** (-torch.arange(size // 2) * 2 / size)
    angles = torch.arange(length)[:, None, None] * speeds

    turned = torch.complex(*heads.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)

    found = _rotate(heads, (model.cosines, model.sines))
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), dim=-1))


def document_losses(model, documents, device):
    """The mean loss of each document alone, by its tokens."""
    losses = {}
    for document in documents:
        ids = torch.tensor(document, device=device)[None]
        losses[tuple(document)] = (model(ids[:, :-1], ids[:, 1:]) / (len(document) - 1)).item()
    return losses


def packed_losses(model, store, device, *, masked=True):
    """The same from packed rows: each document's targets alone count, the others are there."""
    losses = {}
    for batch in ps.Loader(ps.Packs(store, 64), 4, epochs=1, drop_last=False, device=device):
        ids = batch["document_ids"]
        seen = ids if masked else None
        for row in range(len(ids)):
            for number in range(int(ids[row].max()) + 1):
                own = torch.zeros_like(ids, dtype=torch.bool)
                own[row] = ids[row] == number
                targets = batch["targets"].masked_fill(~own, -100)
                count = int((targets != -100).sum())
                if count:
                    loss = model(batch["inputs"], targets, batch["position_ids"], seen) / count
                    losses[tuple(batch["inputs"][own].tolist())] = loss.item()
    return losses


def largest_difference(store, options, device, **how):
    model = made(**options).to(device)
    documents = [each.tolist() for each in store if 1 < len(each) <= 64]
    with torch.no_grad():
        alone = document_losses(model, documents, device)
        packed = packed_losses(model, store, device, **how)
    assert len(alone) > 20
    return max(abs(alone[document] - packed[document]) for document in alone)


@pytest.fixture(scope="module")
def short_store(tmp_path_factory):
    texts = [f"{number} " + "ab c" * (number % 14) for number in range(40)]
    return ps.build(ps.Texts(texts), tmp_path_factory.mktemp("short") / "s", tokenizer="bytes")


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_packed_documents_lose_what_they_lose_alone(short_store, options):
    """To 2e-6 nats a token in float32: the same numbers, summed in another order."""
    assert largest_difference(short_store, options, "cpu") < 2e-6


def test_without_the_mask_they_do_not(short_store):
    assert largest_difference(short_store, {}, "cpu", masked=False) > 1e-3


def test_a_model_that_cannot_be_is_refused():
    with pytest.raises(
        PlanError,
        match=r"width=768 cannot be split into 7 heads .* multiple of 14\.",
    ):
        ModelConfig(heads=7)
    with pytest.raises(PlanError, match="dropout must be at least 0 and below 1; got 1"):
        ModelConfig(dropout=1)
    with pytest.raises(PlanError, match="Every dimension of a model must be at least 1"):
        ModelConfig(layers=0)
    with pytest.raises(PlanError, match=r"no model size '774M'\. Use one of nano, 124M, 350M\."):
        model_config("774M")


def test_operations_are_counted_as_papers_do():
    """6 N and 12 L H Q T: about 0.86 GFLOP a token at GPT-2's size and 1,024 tokens."""
    assert SIZES["124M"].flops_per_token == pytest.approx(0.855e9, rel=0.01)
