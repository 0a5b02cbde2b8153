"""The loader on a GPU: are batches exact while the GPU is busy, and does the GPU wait for data?

    PYTHONPATH=src python benchmarks/gpu.py STORE --parts exact feeds modes [--json FILE]

Needs a CUDA device, torch and numpy; FP8 also needs torchao.

exact    runs kernels that take longer than refilling the pinned buffers, and compares every batch
         with the same batch on the CPU.
feeds    trains GPT-2 124M with each way of loading in `feeds.py`, a few steps at a time. The
         ceiling is training on a batch that is on the device already. Then the same on one core.
modes    trains 50 steps each: eager, compiled, with recomputation, with document masks, in FP8,
         and all together. Measures the speed relative to its own ceiling, compares fingerprints,
         and counts compilations after the warm-up.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from feeds import COPIED, Feeds, count_copies

import penstock as ps
from penstock.train import SIZES, Learner, OptimizationConfig, TrainingConfig, TrainingJob, World


def busy_and_equal(store, num_batches, length=1024, batch_size=32):
    """Compare batches on the device with those on the CPU while kernels keep the GPU busy."""
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
        for _ in range(3):  # queued before the batch is read: the copy must not be late
            noise = noise @ noise.T / 2048
        expected = [right[name].cuda(non_blocking=False) for name in ("inputs", "targets")]
        found = [batch[name] for name in ("inputs", "targets")]
        equal = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        different += not equal
        if number % 500 == 0:
            kept.append((batch["inputs"], right["inputs"]))
    # A slot that was refilled too early would have overwritten a batch that was returned.
    late = sum(not torch.equal(a.cpu(), b) for a, b in kept)
    seconds = time.perf_counter() - start
    print(
        f"{num_batches:,} batches on a busy GPU: {different} differ, {late} of {len(kept)} kept "
        f"batches changed later ({seconds:.1f} s)"
    )
    return different + late


def free_running(store, num_batches, length=1024, batch_size=32):
    """The same without a synchronization per batch: checksums are compared at the end."""
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


FEEDS = ("store", "mixture", "packed", "stream", "DataLoader", "get_batch")
MODES = {
    "eager": {},
    "compile": {"compile": True},
    "recompute": {"recompute": True},
    "compile, recompute": {"compile": True, "recompute": True},
    "masks (eager)": {"feed": "packed"},
    "masks": {"compile": True, "feed": "packed"},
    "fp8": {"compile": True, "precision": "fp8"},
    "all": {"compile": True, "recompute": True, "precision": "fp8", "feed": "packed"},
}


class Trainer:
    """GPT-2 124M in one mode; it uses the training step of `penstock.train`."""

    def __init__(self, options, **mode):
        size, length = options.size, options.length
        model = replace(SIZES[size], length=length)
        training = TrainingConfig(**{"steps": 1, "batch_size": 1, "precision": "bfloat16", **mode})
        job = TrainingJob(
            plan=None,
            val=None,
            model=model,
            training=training,
            optimization=OptimizationConfig(),
            output=Path("unused"),
        )
        self.learner = Learner(job, World(0, 1, torch.device(options.device)))
        self.learner.start()
        self.flops = model.flops_per_token

    def step(self, batch):
        """Queue one step; returns its loss and gradient norm, on the device."""
        names = ("inputs", "targets", "position_ids", "document_ids")
        part = [batch[name].contiguous() if name in batch else None for name in names]
        numbers = self.learner.compute_gradients([part], (batch["targets"] != -100).sum())
        self.learner.optimizers.step(0.1)
        self.learner.optimizers.zero_grad()
        return numbers


def idle():
    """Wait until the device has finished all queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(trainer, batches, steps, fingerprints=None):
    """Seconds of `steps` steps, and the part of it spent waiting for batches."""
    idle()
    waited, begun = 0.0, time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        if fingerprints is not None:
            fingerprints.append(fingerprints.loader.fingerprint)
        numbers = trainer.step(batch)
    idle()
    seconds = time.perf_counter() - begun
    assert bool(numbers.isfinite().all()), "the loss is not finite"
    return seconds, waited


class Fingerprints(list):
    """The fingerprints of the batches that a loader returned."""

    loader = None


def opened(feeds, names):
    """An iterator for each way of loading that works here; prints why others do not."""
    found = {}
    for name in names:
        try:
            found[name] = feeds.make(name)
            next(found[name])
        except Exception as error:  # noqa: BLE001  (a package may not be installed)
            found.pop(name, None)
            print(f"{name}: not measured: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return found


def compare(trainer, feeds, options, cores):
    """Tokens per second of each way of loading, its share of the ceiling, waiting, bytes copied.

    A stream starts again whenever it is measured. So its text is tokenized during its own
    measurement and not during those of the others.
    """
    begun = opened(feeds, options.feeds)
    feeds.end_stream()
    ceilings = {kind: feeds.ceiling(kind) for kind in ("store", "packed") if kind in begun}
    ceilings.setdefault("store", feeds.ceiling("store"))
    for name, batches in [*ceilings.items(), *begun.items()]:
        if name != "stream":
            timed(trainer, batches, options.warm_up)
    tokens = options.rows * options.length * options.steps
    result = {name: {"speed": [], "ratio": [], "waiting": [], "bytes": []} for name in begun}
    tops = {kind: [] for kind in ceilings}
    under_way = 0
    for _ in range(options.repetitions):
        for name, batches in begun.items():
            kind = "packed" if name == "packed" else "store"
            before = timed(trainer, ceilings[kind], options.steps)[0]
            if name == "stream":
                batches = feeds.make("stream")
                timed(trainer, batches, 2 * options.warm_up)
            COPIED["bytes"] = 0
            seconds, waited = timed(trainer, batches, options.steps)
            copied = COPIED["bytes"] / tokens
            under_way += feeds.end_stream()
            after = timed(trainer, ceilings[kind], options.steps)[0]
            tops[kind] += [tokens / before, tokens / after]
            result[name]["speed"].append(tokens / seconds)
            result[name]["ratio"].append((before + after) / 2 / seconds)
            result[name]["waiting"].append(waited / seconds)
            result[name]["bytes"].append(copied)
    print(
        f"\n{cores}: {options.steps} steps of {options.rows} x {options.length} in turn, "
        f"medians of {options.repetitions}"
    )
    for kind, speeds in tops.items():
        speed = statistics.median(speeds)
        mfu = trainer.flops * speed / 989e12
        spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
        print(f"  ceiling, {kind:<10} {speed:>11,.0f} tokens/s ({spread}), {mfu:.1%} of 989 TFLOPS")
    for name, each in result.items():
        ratios = each["ratio"]
        print(
            f"  {name:<19} {statistics.median(each['speed']):>11,.0f} tokens/s, "
            f"{statistics.median(ratios):.4f} of the ceiling ({min(ratios):.4f} to "
            f"{max(ratios):.4f}), waiting {statistics.median(each['waiting']):.3%}, "
            f"{statistics.median(each['bytes']):.1f} bytes copied per token",
            flush=True,
        )
    if "stream" in result:
        print(
            f"  in {under_way} measurements of the stream, the build was still running at the end"
        )
    return {"ceilings": tops, "feeds": result}


def measure_feeds(options):
    """All ways of loading, with all CPU cores and then with one."""
    count_copies()
    feeds = Feeds(
        options.store,
        length=options.length,
        rows=options.rows,
        text=options.text,
        workers=options.workers,
        device=options.device,
    )
    trainer = Trainer(options, compile=options.device == "cuda")
    every = os.sched_getaffinity(0)
    figures = {"all cores": compare(trainer, feeds, options, f"{len(every)} cores")}
    gc.collect()
    pin({min(every)})
    try:
        figures["one core"] = compare(trainer, feeds, options, "one core")
    finally:
        pin(every)
    return figures


def pin(cores):
    """Restrict every thread of this process to these cores; new threads inherit it."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def measure_modes(options):
    """Each mode for 50 steps, and its own ceiling."""
    from torch._dynamo.utils import counters

    figures, seen = {}, {}
    print(f"\nmodes: {options.mode_steps} steps of {options.rows} x {options.length}")
    for name in options.modes:
        mode = dict(MODES[name])
        kind = mode.pop("feed", "store")
        torch._dynamo.reset()
        try:
            feeds = Feeds(
                options.store, length=options.length, rows=options.rows, device=options.device
            )
            begun = time.perf_counter()
            trainer = Trainer(options, **mode)
            loader = feeds.loader(kind)
            batches, ceiling = iter(loader), feeds.ceiling(kind)
            timed(trainer, batches, options.warm_up)
            warm = time.perf_counter() - begun
            graphs = counters["stats"]["unique_graphs"]
            fingerprints = Fingerprints()
            fingerprints.loader = loader
            before = timed(trainer, ceiling, options.mode_steps)[0]
            seconds, waited = timed(trainer, batches, options.mode_steps, fingerprints)
            after = timed(trainer, ceiling, options.mode_steps)[0]
            compiled = counters["stats"]["unique_graphs"] - graphs
        except Exception as error:  # noqa: BLE001  (torchao is missing, or memory is too small)
            print(
                f"  {name:<20} not measured: {type(error).__name__}: {str(error)[:300]}", flush=True
            )
            continue
        finally:
            trainer = batches = ceiling = loader = None
            gc.collect()
            torch.cuda.empty_cache()
        speed = options.rows * options.length * options.mode_steps / seconds
        same = seen.setdefault(kind, list(fingerprints)) == list(fingerprints)
        figures[name] = {
            "speed": speed,
            "ratio": (before + after) / 2 / seconds,
            "waiting": waited / seconds,
            "same_fingerprints": same,
            "compiled_after_warm_up": compiled,
            "warm_up_seconds": warm,
        }
        print(
            f"  {name:<20} {speed:>11,.0f} tokens/s, {figures[name]['ratio']:.4f} of its ceiling, "
            f"waiting {waited / seconds:.3%}, fingerprints {'equal' if same else 'DIFFER'}, "
            f"{compiled} compilations after the warm-up ({warm:.0f} s)",
            flush=True,
        )
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("store")
    parts = ("exact", "feeds", "modes")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--batches", type=int, default=10_000, help="batches of the exact part")
    parser.add_argument(
        "--steps", type=int, default=20, help="steps per measurement of the feeds part"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--warm-up", type=int, default=10, help="steps before the first measurement"
    )
    parser.add_argument("--mode-steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--size", choices=list(SIZES), default="124M")
    parser.add_argument("--workers", type=int, default=8, help="workers of the DataLoader")
    parser.add_argument("--text", help="text file for the stream")
    parser.add_argument("--feeds", nargs="+", choices=FEEDS, default=FEEDS)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda", help="cpu only tests that the script runs")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(device, "torch", torch.__version__)
    wrong, figures = 0, {"device": device, "torch": torch.__version__}
    if "exact" in options.parts:
        wrong += busy_and_equal(options.store, options.batches)
        wrong += free_running(options.store, options.batches)
    for name, measure in (("feeds", measure_feeds), ("modes", measure_modes)):
        if name in options.parts:
            figures[name] = measure(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    wrong += sum(not each["same_fingerprints"] for each in figures.get("modes", {}).values())
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
