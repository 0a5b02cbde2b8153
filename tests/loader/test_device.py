"""The CUDA path; run with `pytest -m gpu` on a machine that has a device.

`pytest -m gpu --noconftest tests/loader/test_device.py` needs NumPy and torch alone.
"""

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.loader import BatchFormat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, (np.arange(400_000, dtype=np.uint64) * 7919 % 65_521).astype(np.uint16))
    return path


def named(batch):
    return batch if isinstance(batch, dict) else dict(enumerate(batch))


@pytest.mark.filterwarnings("ignore:format=.hf. leaves out")
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"format": BatchFormat(ids=True)},
        {"format": "tuple"},
        {"format": "hf", "shuffle": "none"},
        {"format": "narrow"},
    ],
    ids=str,
)
def test_batches_on_the_device_equal_those_on_the_host_while_it_is_busy(tokens, options, prefetch):
    """Also those whose targets are masked, which is computed there."""
    rows = ps.Windows(tokens, 256, tail="pad")
    options = {"seed": 1, "epochs": 3, "drop_last": False, **options}
    on_device = iter(ps.Loader(rows, 16, device="cuda", prefetch=prefetch, **options))
    noise = torch.randn(2048, 2048, device="cuda")

    for right in ps.Loader(rows, 16, prefetch=0, **options):
        for _ in range(3):
            noise = noise @ noise.T / 2048
        found = named(next(on_device))
        assert list(found) == list(named(right))
        for name, values in named(right).items():
            assert found[name].device.type == "cuda"
            assert found[name].dtype == values.dtype
            assert torch.equal(found[name].cpu(), values)
    assert next(on_device, None) is None


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_the_largest_ids_keep_their_value_on_the_device(tmp_path, dtype):
    largest = min(np.iinfo(dtype).max, 2**62)
    np.save(tmp_path / "wide.npy", np.array([0, largest // 2 + 1, largest] * 20, dtype))
    batch = next(iter(ps.Loader(ps.Windows(tmp_path / "wide.npy", 6), 1, device="cuda")))

    assert batch["inputs"].dtype == torch.int64
    assert batch["inputs"].cpu().unique().tolist() == [0, largest // 2 + 1, largest]


def test_any_step_can_be_asked_for_while_the_device_is_busy(tokens):
    rows = ps.Windows(tokens, 256, tail="pad")
    options = {"epochs": 1, "drop_last": False, "shuffle": "none"}
    on_device = ps.Loader(rows, 16, device="cuda", **options)
    on_host = ps.Loader(rows, 16, **options)
    noise = torch.randn(4096, 4096, device="cuda")

    for step in [*range(5), -1]:
        for _ in range(5):
            noise = noise @ noise.T / 4096
        for name, values in on_host[step].items():
            assert torch.equal(on_device[step][name].cpu(), values)


def test_batches_are_used_on_the_stream_that_is_current(tokens):
    """Work on another stream waits for the batch, too, and its memory is not given away."""
    rows = ps.Windows(tokens, 256)
    side = torch.cuda.Stream()
    sums = []
    with torch.cuda.stream(side):
        noise = torch.randn(2048, 2048, device="cuda")
        for batch in ps.Loader(rows, 16, epochs=2, device="cuda"):
            noise = noise @ noise.T / 2048
            sums.append(batch["inputs"].sum())
            del batch
    torch.cuda.synchronize()

    right = [batch["inputs"].sum().item() for batch in ps.Loader(rows, 16, epochs=2)]
    assert [each.item() for each in sums] == right


def test_batches_that_are_kept_are_not_overwritten(tokens):
    loader = ps.Loader(ps.Windows(tokens, 256), 8, seed=2, epochs=1, device="cuda")
    kept = list(loader)
    again = ps.Loader(ps.Windows(tokens, 256), 8, seed=2, epochs=1, prefetch=0)

    for found, right in zip(kept, again, strict=True):
        assert torch.equal(found["inputs"].cpu(), right["inputs"])
