"""Read tokens from an object store: compare penstock with LitData and MosaicML Streaming.

    python benchmarks/remote.py [--tokens 100000000] [--repetitions 3] [--latency 0.02]

All cases read the same tokens from the same S3 server on this machine (`object_server.py`), in
batches of 32 rows of 1,024 tokens, int64, shuffled as each does by default for remote data:
penstock within groups of four parts, LitData within chunks, MosaicML Streaming within blocks of
shards. Their files have the sizes that their documentation uses. Peers run without workers and
with two.

*first batch* is the time from opening with an empty cache to the first batch, without imports;
*cold* the tokens/s of the first epoch, with it; *warm* those of the second epoch in the same
process, whose files are all on the disk. Each case runs in a new process with an empty cache, and
repetitions alternate between the cases. Figures are medians with the lowest and the highest value.
The server and its client share the cores of the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from measure import machine, spread
from peers import BATCH, LENGTH, ROW, SEED, LitData, Mosaic, _joined, _stacked
from stores import write_array, write_store

_PART_TOKENS = 14_000_000  # the tokens of 64 MB of English text, as in a part of a real store


class RemotePenstock:
    """The loader with its defaults, over a URL."""

    def __init__(self, folder):
        import penstock

        self.penstock, self.folder = penstock, folder / "store"

    def prepare(self, tokens):
        num_parts = max(1, round(len(tokens) / _PART_TOKENS))
        write_store(self.folder, np.array_split(tokens, num_parts))

    def open(self, cache):
        os.environ["PENSTOCK_CACHE"] = str(cache)
        rows = self.penstock.Windows("s3://bucket/store", LENGTH)
        return self.penstock.Loader(rows, BATCH, seed=SEED, epochs=1, format="tuple")


class RemoteLitData(LitData):
    def __init__(self, folder):
        super().__init__(folder)
        from litdata.streaming import downloader

        # Its client speaks https only, and has no setting for that. The server here has no
        # certificate.
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True

    def open(self, cache, num_workers=0):
        rows = self.litdata.StreamingDataset(
            "s3://bucket/litdata",
            cache_dir=str(cache),
            item_loader=self.litdata.TokensLoader(block_size=ROW),
            shuffle=True,
            drop_last=True,
            seed=SEED,
        )
        return self.litdata.StreamingDataLoader(
            rows, batch_size=BATCH, num_workers=num_workers, collate_fn=_stacked, drop_last=True
        )


class RemoteMosaic(Mosaic):
    def open(self, cache, num_workers=0):
        os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
        rows = self.base.StreamingDataset(
            remote="s3://bucket/mds",
            local=str(cache),
            batch_size=BATCH,
            shuffle=True,
            shuffle_seed=SEED,
            num_canonical_nodes=1,
        )
        return self.base.StreamingDataLoader(
            rows, batch_size=BATCH, num_workers=num_workers, collate_fn=_joined, drop_last=True
        )


CASES = {
    "penstock": (RemotePenstock, {}),
    "LitData": (RemoteLitData, {}),
    "LitData, 2 workers": (RemoteLitData, {"num_workers": 2}),
    "MosaicML Streaming": (RemoteMosaic, {}),
    "MosaicML Streaming, 2 workers": (RemoteMosaic, {"num_workers": 2}),
}


def measure(name, folder):
    """One process: the time to the first batch, and the speed of a cold and of a warm epoch."""
    kind, options = CASES[name]
    case = kind(folder)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        begun = time.perf_counter()
        loader = case.open(Path(cache), **options)
        batches = iter(loader)
        check(next(batches))
        first = time.perf_counter() - begun
        count = 1 + sum(1 for _ in batches)
        cold = time.perf_counter() - begun
        begun = time.perf_counter()
        again = sum(1 for _ in loader)
        warm = time.perf_counter() - begun
    tokens = BATCH * LENGTH
    return {
        "first": first,
        "cold": count * tokens / cold / 1e6,
        "warm": again * tokens / warm / 1e6,
        "batches": count,
    }


def check(batch):
    inputs, targets = batch
    assert inputs.shape == targets.shape == (BATCH, LENGTH), inputs.shape
    assert inputs.dtype == targets.dtype == torch.int64, inputs.dtype
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def prepare(folder, num_tokens):
    """Write the tokens in the format of each case."""
    (folder / "array").mkdir()
    tokens = np.random.default_rng(SEED).integers(0, 50_257, num_tokens, dtype=np.uint16)
    write_array(folder / "array" / "tokens.npy", tokens)
    for kind in dict.fromkeys(kind for kind, _ in CASES.values()):
        kind(folder).prepare(tokens)


def run(name, folder, environment):
    command = [sys.executable, __file__, "--case", name, "--folder", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-3_000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds of each answer")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case:
        print(json.dumps(measure(options.case, options.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, options.tokens)
        script = Path(__file__).with_name("object_server.py")
        server = subprocess.Popen(
            [sys.executable, str(script), str(folder), "--latency", str(options.latency)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
            keys |= {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
            endpoint = server.stdout.readline().strip()
            environment = {**os.environ, **keys, "AWS_ENDPOINT_URL": endpoint}
            found = {each: [] for each in CASES}
            for _ in range(options.repetitions):
                for each in CASES:
                    found[each].append(run(each, folder, environment))
        finally:
            server.terminate()
            server.wait()
    report(found, options)


def report(found, options):
    print(f"{machine()}; {options.tokens:,} tokens, latency {options.latency:g} s")
    print(f"{'':32}{'first batch, ms':>36}{'cold, Mtokens/s':>36}{'warm, Mtokens/s':>36}")
    for name, results in found.items():
        columns = [spread([each["first"] * 1_000 for each in results])]
        columns += [spread([each[kind] for each in results]) for kind in ("cold", "warm")]
        print(f"{name:32}" + "".join(f"{column:>36}" for column in columns))
    for kind in ("first", "cold", "warm"):
        medians = {
            name: statistics.median(each[kind] for each in results)
            for name, results in found.items()
        }
        ours = medians.pop("penstock")
        best = min(medians.values()) if kind == "first" else max(medians.values())
        ratio = best / ours if kind == "first" else ours / best
        print(f"{kind}: {ratio:.2f} times as fast as the faster peer")


if __name__ == "__main__":
    main()
