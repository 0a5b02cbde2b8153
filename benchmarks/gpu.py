"""The loader on a GPU: are batches exact while the GPU is busy, and does the GPU wait?

    python benchmarks/gpu.py STORE [--batches 10000] [--steps 60]

Needs a CUDA device, torch and numpy, nothing else. The first part keeps the compute stream
occupied with a kernel that outlasts the refilling of the pinned slots, and compares every
batch with the CPU path. The second part trains a GPT-2-sized model and measures the share
of a step that the host spends waiting for its batch.
"""

import argparse
import statistics
import time

import torch
from torch import nn

import penstock as ps


def busy_and_equal(store, num_batches, length=1024, batch_size=32):
    """Compare batches on the device with the CPU path while a kernel keeps the GPU occupied."""
    windows = ps.Windows(store, length)
    on_device = ps.Loader(windows, batch_size, seed=3, device="cuda")
    on_host = ps.Loader(windows, batch_size, seed=3, prefetch=0)
    noise = torch.randn(2048, 2048, device="cuda")
    different = 0
    start = time.perf_counter()
    kept = []
    for number, (batch, right) in enumerate(zip(on_device, on_host, strict=False)):
        if number == num_batches:
            break
        for _ in range(3):  # work queued before the batch is read: the copy must not be late
            noise = noise @ noise.T / 2048
        expected = [right[name].cuda(non_blocking=False) for name in ("inputs", "targets")]
        found = [batch[name] for name in ("inputs", "targets")]
        equal = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        different += not equal
        if number % 500 == 0:
            kept.append((batch["inputs"], right["inputs"]))
    late = sum(not torch.equal(a.cpu(), b) for a, b in kept)  # overwritten after handing out?
    seconds = time.perf_counter() - start
    print(
        f"{num_batches:,} batches under a busy GPU: {different} differ, {late} of {len(kept)} kept "
        f"ones changed later ({seconds:.1f} s)"
    )
    return different + late


def free_running(store, num_batches, length=1024, batch_size=32):
    """The same without waiting for each comparison: sums are compared at the end."""
    windows = ps.Windows(store, length)
    on_device = iter(ps.Loader(windows, batch_size, seed=4, device="cuda"))
    on_host = iter(ps.Loader(windows, batch_size, seed=4, prefetch=0))
    weights = torch.arange(1, length + 1, device="cuda")
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    sums = []
    for _ in range(num_batches):
        for _ in range(4):
            noise = noise @ noise / 64
        batch = next(on_device)
        sums.append((batch["inputs"] * weights).sum() + 3 * (batch["targets"] * weights).sum())
    found = torch.stack(sums).cpu()
    weights = weights.cpu()
    right = []
    for _ in range(num_batches):
        batch = next(on_host)
        right.append((batch["inputs"] * weights).sum() + 3 * (batch["targets"] * weights).sum())
    different = int((found != torch.stack(right)).sum())
    print(f"{num_batches:,} batches without waiting: {different} differ")
    return different


class Layer(nn.Module):
    """One block of GPT-2."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.attend(self.norms[0](x)).chunk(3, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.shrink(nn.functional.gelu(self.grow(self.norms[1](x))))


class Model(nn.Module):
    """GPT-2 124M."""

    def __init__(self, vocabulary=50304, length=1024, width=768, heads=12, layers=12):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def waiting(store, num_steps, length=1024, batch_size=32):
    """The share of a GPT-2-sized step that the host spends waiting for data."""
    torch.set_float32_matmul_precision("high")
    model = Model(length=length).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)
    batches = iter(ps.Loader(ps.Windows(store, length), batch_size, seed=5, device="cuda"))
    waits, steps = [], []
    for step in range(num_steps + 10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        batch = next(batches)
        got = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(batch["inputs"], batch["targets"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        end = time.perf_counter()
        if step >= 10:
            waits.append(got - start)
            steps.append(end - start)
    share = sum(waits) / sum(steps)
    print(
        f"GPT-2 124M, batch {batch_size} x {length}: step {statistics.median(steps) * 1e3:.1f} ms, "
        f"waiting for data {statistics.median(waits) * 1e6:.0f} us median, "
        f"{max(waits) * 1e6:.0f} us at most: {share:.4%} of the step "
        f"({batch_size * length / statistics.median(steps):,.0f} tokens/s, loss {loss.item():.3f})"
    )
    return share


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("store")
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    wrong = busy_and_equal(options.store, options.batches)
    wrong += free_running(options.store, options.batches)
    share = waiting(options.store, options.steps)
    raise SystemExit(1 if wrong or share >= 0.005 else 0)


if __name__ == "__main__":
    main()
