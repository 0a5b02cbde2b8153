"""The CUDA path; run with `pytest -m gpu` on a machine that has a device."""

import pytest
import torch

import penstock as ps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    import numpy as np

    path = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(path, (np.arange(400_000, dtype=np.uint64) * 7919 % 65_521).astype(np.uint16))
    return path


@pytest.mark.parametrize("options", [{}, {"ids": True}, {"lengths": {0: 64, 500: 256}}])
def test_batches_on_the_device_equal_those_on_the_host_while_it_is_busy(tokens, options):
    rows = ps.Windows(tokens, 256)
    on_device = iter(ps.Loader(rows, 16, seed=1, epochs=3, device="cuda", **options))
    noise = torch.randn(2048, 2048, device="cuda")

    for right in ps.Loader(rows, 16, seed=1, epochs=3, prefetch=0, **options):
        for _ in range(3):
            noise = noise @ noise.T / 2048
        found = next(on_device)
        assert list(found) == list(right)
        for name, values in right.items():
            assert found[name].dtype == values.dtype
            assert torch.equal(found[name].cpu(), values)


def test_ids_above_two_to_the_fifteen_keep_their_value_on_the_device(tmp_path):
    import numpy as np

    np.save(tmp_path / "wide.npy", np.array([0, 2**15, 2**16, 2**31, 2**32 - 1] * 20, np.uint32))
    batch = next(iter(ps.Loader(ps.Windows(tmp_path / "wide.npy", 5), 1, device="cuda")))

    assert batch["inputs"].cpu().max() == 2**32 - 1


def test_batches_that_are_kept_are_not_overwritten(tokens):
    loader = ps.Loader(ps.Windows(tokens, 256), 8, seed=2, epochs=1, device="cuda")
    kept = list(loader)
    again = ps.Loader(ps.Windows(tokens, 256), 8, seed=2, epochs=1, prefetch=0)

    for found, right in zip(kept, again, strict=True):
        assert torch.equal(found["inputs"].cpu(), right["inputs"])
