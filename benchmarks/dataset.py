"""Compare a DataLoader over `TransformerDataset` with one over a list of ids.

    python benchmarks/dataset.py [--megabytes 50] [--json FILE]

Both read the same text with the same tokenizer: rows of 128 tokens, stride 1, shuffled, no
workers. The speed is tokens per second of wall-clock time, and of processor time, which depends
less on other programs; figures are medians of alternating repetitions. The memory is the peak of
anonymous memory in a new process that opens the file and reads a hundred batches, minus the
memory of imports and the tokenizer. It is measured for the first start of penstock, which
tokenizes the text, and for the second, which does not.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from measure import AnonymousMemory, alternate, forked, machine, spread
from torch.utils.data import DataLoader, Dataset

import penstock
from penstock.integrations.pytorch import create_dataloaders

LENGTH = 128
BATCHES = (16, 128)


class ListDataset(Dataset):
    """The usual way to write it: a list of Python integers, and two new tensors per item."""

    def __init__(self, path, tokenizer):
        self.ids = []
        with open(path, encoding="utf-8") as stream:  # noqa: PTH123
            for line in stream:
                self.ids.extend(tokenizer.encode(json.loads(line)["text"]).tolist())

    def __len__(self):
        return max(0, len(self.ids) - LENGTH)

    def __getitem__(self, index):
        inputs = self.ids[index : index + LENGTH]
        labels = self.ids[index + 1 : index + LENGTH + 1]
        return {
            "input_ids": torch.tensor(inputs, dtype=torch.long),
            "labels": torch.tensor(labels, dtype=torch.long),
        }


def write_text(path, num_bytes):
    """Write JSON lines of random words with the frequencies of natural text (Zipf)."""
    rng = np.random.default_rng(17)
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(20_000)]
    shares = 1 / np.arange(1, len(words) + 1)
    shares /= shares.sum()
    size = 0
    with path.open("w") as stream:
        while size < num_bytes:
            chosen = rng.choice(len(words), 400, p=shares)
            size += stream.write(json.dumps({"text": " ".join(words[i] for i in chosen)}) + "\n")


def batches(loader, num_batches):
    """Wall-clock and processor seconds of `num_batches` batches after the first one."""
    source = iter(loader)
    next(source)
    wall, processor = time.perf_counter(), time.thread_time()
    for _ in range(num_batches):
        next(source)
    return time.perf_counter() - wall, time.thread_time() - processor


def plain_loader(path, tokenizer, batch_size):
    dataset = ListDataset(path, tokenizer)
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)


def memory(make):
    """Peak anonymous bytes while a loader is created and yields a hundred batches."""

    def work():
        with AnonymousMemory() as watched:
            loader = make()
            batches(loader, 100)
        return watched.growth

    return forked(work)


def race(ours, plain, batch_size, repetitions):
    """Tokens per second of both, by wall-clock time and by processor time."""
    result = {"penstock": [], "list of ids": []}

    def case(name, loader, num_batches):
        def run():
            took = batches(loader, num_batches)
            tokens = num_batches * batch_size * LENGTH
            result[name].append([tokens / seconds for seconds in took])

        return run

    alternate(
        {
            "penstock": case("penstock", ours, 200_000 // batch_size),
            "list of ids": case("list of ids", plain, 4_000 // batch_size),
        },
        repetitions,
    )
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = penstock.load_tokenizer("gpt2")
    tokenizer.encode("both start with a tokenizer that is warm")
    folder = tempfile.mkdtemp()  # a forked process would delete a TemporaryDirectory
    try:
        os.environ["PENSTOCK_CACHE"] = folder
        path = Path(folder, "text.jsonl")
        write_text(path, options.megabytes << 20)

        def ours(batch_size=16):
            return create_dataloaders(path, path, tokenizer, batch_size, LENGTH)[0]

        peaks = {
            "penstock, first start": memory(ours),
            "penstock, second start": memory(ours),
            "list of ids": memory(lambda: plain_loader(path, tokenizer, 16)),
        }
        plain = ListDataset(path, tokenizer)
        print(f"{len(plain.ids):,} tokens, T={LENGTH}, stride 1; {machine()}", flush=True)
        figures = {"machine": machine(), "tokens": len(plain.ids), "anonymous_bytes": peaks}
        for batch_size in BATCHES:
            loader = DataLoader(plain, batch_size=batch_size, shuffle=True, drop_last=True)
            result = race(ours(batch_size), loader, batch_size, options.repetitions)
            figures[f"batch {batch_size}"] = result
            for number, clock in enumerate(("wall-clock", "processor")):
                speeds = {name: [each[number] / 1e6 for each in result[name]] for name in result}
                ratio = statistics.median(speeds["penstock"]) / statistics.median(
                    speeds["list of ids"]
                )
                print(f"B={batch_size}, million tokens per second ({clock}): {ratio:.1f}x")
                for name, values in speeds.items():
                    print(f"  {name:<12} {spread(values)}", flush=True)
    finally:
        shutil.rmtree(folder)
    print("peak anonymous memory, megabytes:")
    for name, peak in peaks.items():
        print(f"  {name:<24} {peak / 1e6:10,.1f}   1/{peaks['list of ids'] / max(1, peak):.1f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
