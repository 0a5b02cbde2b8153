"""The schedule, and which weights are moved by what."""

from copy import deepcopy

import pytest
import torch

from penstock.errors import PlanError
from penstock.train import GPT, ModelConfig, OptimizationConfig, Optimizers
from penstock.train.optimize import Muon


def test_the_rate_rises_then_falls_to_its_floor():
    settings = OptimizationConfig(warmup_steps=10, floor=0.2)
    rates = [settings.rate(step, 100) for step in range(101)]

    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.6)  # halfway down
    assert rates[100] == pytest.approx(0.2)


def test_a_run_of_unknown_length_stays_at_the_top_after_warming_up():
    settings = OptimizationConfig(warmup_steps=2)

    assert [settings.rate(step, None) for step in (0, 1, 2, 500)] == [0.5, 1.0, 1.0, 1.0]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(ModelConfig(layers=2, heads=2, width=32, length=16, vocab_size=64))


def test_muon_moves_the_matrices_of_layers_and_adamw_the_rest(model):
    adamw, muon = Optimizers(model, OptimizationConfig(optimizer="muon")).all
    names = {id(weight): name for name, weight in model.named_parameters()}

    moved = {names[id(each)] for group in muon.param_groups for each in group["params"]}
    assert moved == {
        f"layers.{number}.{name}.weight"
        for number in range(2)
        for name in ("attention.qkv", "attention.project", "expand", "contract")
    }
    rest = {names[id(each)] for group in adamw.param_groups for each in group["params"]}
    assert rest == set(names.values()) - moved


def test_muon_makes_updates_whose_singular_values_are_near_1():
    torch.manual_seed(1)
    shapes = [(96, 32), (32, 32), (128, 32), (32, 128), (32, 32)]
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn(weight.shape)
    Muon(weights, 1.0, 0.0).step()

    qkv, *others = [weight.detach() for weight in weights]
    others[1] /= 2  # a matrix that is four times as high as wide has steps of twice the size
    for update in (*qkv.chunk(3), *others):
        values = torch.linalg.svdvals(update)
        assert 0.6 < values.median() < values.max() < 1.4


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_does_the_steps_of_torch():
    torch.manual_seed(2)
    shapes = [(32, 32), (128, 32), (32, 128), (32, 32)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours]
    optimizers = Muon(ours, 0.1, 0.3), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.3)
    for _ in range(3):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            two.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()

    for one, two in zip(ours, theirs, strict=True):
        # torch computes in bfloat16 on a CPU too.
        assert torch.allclose(one, two, atol=0.02)


def test_norms_and_biases_do_not_decay(model):
    (adamw,) = Optimizers(model, OptimizationConfig(weight_decay=0.3)).all

    decays = {
        each.dim(): group["weight_decay"]
        for group in adamw.param_groups
        for each in group["params"]
    }
    assert decays == {2: 0.3, 1: 0.0}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizers_go_on_exactly_from_their_state(model, kind):
    settings = OptimizationConfig(optimizer=kind)
    tokens = torch.randint(64, (2, 16))

    def step(model, optimizers):
        model(tokens, tokens).backward()
        optimizers.step(0.5)
        optimizers.zero_grad()

    optimizers = Optimizers(model, settings)
    step(model, optimizers)
    twin = GPT(model.config)
    twin.load_state_dict(model.state_dict())
    again = Optimizers(twin, settings)
    again.load_state_dict(deepcopy(optimizers.state_dict()))
    step(model, optimizers)
    step(twin, again)

    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_rates_that_cannot_be_are_refused():
    with pytest.raises(PlanError, match="learning_rate must be above 0 and finite; got 0"):
        OptimizationConfig(learning_rate=0)
    with pytest.raises(PlanError, match=r"clip must be at least 0 and finite; got -1\.0"):
        OptimizationConfig(clip=-1.0)
