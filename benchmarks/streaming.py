"""Train from a text file at once: compare `ps.stream` with a finished store and two usual ways.

    python benchmarks/streaming.py [--bytes 1100000000] [--repetitions 3] [--file FILE]

All cases read one file with a document per line, in batches of 32 rows of 1,024 tokens, int64.

    penstock, streaming        ps.stream: the whole file, tokenized while it is read
    penstock, whole documents  the same with documents="<|endoftext|>": 5 kB each, not 40 bytes
    penstock, preprocessed     a finished store, shuffled, from the page cache
    datasets, streaming        load_dataset("text", streaming=True), tokenized by batches of
                               1,000, concatenated and split (`group_texts`), in a DataLoader
    line reader, 2 workers     a torch IterableDataset whose workers read every second line each
                               and tokenize with GPT2TokenizerFast

*first batch* is the time from the call to the first batch, without imports; *tokens/s* includes it.
The last two cases stop after some seconds, which can only help them. Each case runs in a new
process, and the repetitions alternate between the cases. Figures are medians with the lowest and
highest value. Memory is peak anonymous memory, workers included; mapped files do not count. At the
end, the rows of streams with 0, 1, 2 and 8 threads and workers are compared.
"""

import argparse
import hashlib
import json
import shutil
import statistics
import tempfile
import time
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import awkward  # noqa: F401  (imported here so that the import is not measured)
import corpus
import gigatoken  # noqa: F401
import numpy as np
import pyarrow.compute  # noqa: F401
import tokenizers
import torch
from measure import AnonymousMemory, forked, machine

import penstock as ps
from penstock.loader import BatchFormat, Loader
from penstock.rows.windows import Windows
from penstock.tokenize.definition import find_definition

LENGTH, BATCH = 1024, 32
WORKERS = (0, 1, 2, 8)


def prefix(path, num_bytes, folder):
    """A file with the first lines of `path`, about `num_bytes` long."""
    if path.stat().st_size <= num_bytes:
        return path
    copy = folder / f"prefix-{num_bytes}.txt"
    with path.open("rb") as source, copy.open("wb") as target:
        left = num_bytes
        while left > 0:
            left -= target.write(source.read(min(left, 1 << 24)))
        target.write(source.readline())
    return copy


def timed(batches, seconds=None):
    """Seconds to the first batch, tokens per second, and tokens."""
    begun = time.perf_counter()
    iterator = iter(batches())
    next(iterator)["inputs"].sum()
    first = time.perf_counter() - begun
    count, deadline = 1, None if seconds is None else begun + first + seconds
    for _ in iterator:
        count += 1
        if deadline is not None and time.perf_counter() > deadline:
            break
    return {
        "first": first,
        "speed": count * BATCH * LENGTH / (time.perf_counter() - begun),
        "tokens": count * BATCH * LENGTH,
    }


def streamed(path, folder, **options):
    """Read the whole file as a stream."""
    store = Path(tempfile.mkdtemp(dir=folder))

    def batches():
        stream = ps.stream(path, store, **{"documents": "lines", **options})
        yield from Loader(Windows(stream, LENGTH), BATCH, epochs=1)
        stream.close()

    try:
        return timed(batches)
    finally:
        shutil.rmtree(store)


def preprocessed(store):
    """Read a finished store for five seconds."""
    return timed(lambda: Loader(Windows(store, LENGTH), BATCH), seconds=5)


def fast_tokenizer():
    """GPT-2's tokenizer as a transformers object, without a download."""
    import transformers

    made = tokenizers.Tokenizer.from_str(json.dumps(find_definition("gpt2").config))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


def hub_streamed(path, seconds):
    """The usual recipe with datasets."""
    import datasets
    from torch.utils.data import DataLoader

    tokenizer = fast_tokenizer()
    datasets.disable_progress_bars()

    def tokenize(examples):
        texts = [text for text in examples["text"] if text.strip()]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return {"ids": [[*each, tokenizer.eos_token_id] for each in ids]}

    def group_texts(examples):
        joined = [token for ids in examples["ids"] for token in ids]
        rows = range(0, len(joined) - LENGTH, LENGTH)
        return {
            "inputs": [joined[start : start + LENGTH] for start in rows],
            "targets": [joined[start + 1 : start + LENGTH + 1] for start in rows],
        }

    def stacked(rows):
        # Not with_format("torch"): the functions above would get tensors too, and would take ten
        # times as long.
        return {name: torch.tensor([row[name] for row in rows]) for name in ("inputs", "targets")}

    def batches():
        lines = datasets.load_dataset("text", data_files=str(path), split="train", streaming=True)
        tokens = lines.map(tokenize, batched=True, batch_size=1_000, remove_columns=["text"])
        rows = tokens.map(group_texts, batched=True, batch_size=1_000, remove_columns=["ids"])
        return DataLoader(rows, batch_size=BATCH, collate_fn=stacked)

    return timed(batches, seconds)


class Lines(torch.utils.data.IterableDataset):
    """Rows from the lines of a file; the workers read different lines."""

    def __init__(self, path):
        self._path = path

    def __iter__(self):
        tokenizer = fast_tokenizer()
        worker = torch.utils.data.get_worker_info()
        number, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        held = []
        with self._path.open(encoding="utf-8", errors="replace") as stream:
            for line in islice(stream, number, None, step):
                if line.strip():
                    held += tokenizer(line, add_special_tokens=False)["input_ids"]
                    held.append(tokenizer.eos_token_id)
                while len(held) > LENGTH:
                    row = torch.tensor(held[: LENGTH + 1])
                    yield {"inputs": row[:-1], "targets": row[1:]}
                    held = held[LENGTH:]


def line_reader(path, seconds):
    from torch.utils.data import DataLoader

    return timed(lambda: DataLoader(Lines(path), batch_size=BATCH, num_workers=2), seconds)


def same_rows(path, folder, workers):
    """A digest of all rows of a stream, the number of batches, and whether no row repeats."""
    store, digest, count = Path(tempfile.mkdtemp(dir=folder)), hashlib.sha256(), 0
    with ps.stream(path, store, workers=max(1, workers), documents="lines") as stream:
        loader = Loader(Windows(stream, LENGTH), BATCH, epochs=1, format=BatchFormat(ids=True))
        seen = []
        for batch in loader.as_dataloader(num_workers=workers):
            digest.update(batch["inputs"].numpy().tobytes())
            seen.append(batch["sample"].numpy())
            count += 1
    shutil.rmtree(store)
    samples = np.concatenate(seen)
    return [digest.hexdigest()[:16], count, bool(len(np.unique(samples)) == len(samples))]


def measured(work):
    """The result of `work` in a separate process, with its peak memory."""

    def watched():
        with AnonymousMemory(workers=True) as memory:
            result = work()
        return {**result, "memory": memory.peak}

    return forked(watched)


def show(name, result):
    firsts, speeds = ([each[key] for each in result] for key in ("first", "speed"))
    print(
        f"{name:26} {statistics.median(firsts):7.2f} s ({min(firsts):.2f} to {max(firsts):.2f})"
        f" {statistics.median(speeds):14,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        f" {max(each['memory'] for each in result) / 1e6:8,.0f} MB",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--file", type=Path, default=corpus.DATA / "corpus.txt")
    parser.add_argument("--bytes", type=int, default=1_100_000_000)
    parser.add_argument("--compared-bytes", type=int, default=200_000_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=corpus.DATA)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--peer-seconds", type=float, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        figures = run(options, folder)
    finally:
        shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def run(options, folder):
    path = prefix(options.file, options.bytes, folder)
    print(f"{path.stat().st_size:,} bytes; {machine()}")
    print(f"{'':26} {'first batch':>28} {'tokens/s':>30} {'memory':>12}")
    built = forked(lambda: str(ps.build(path, folder / "built", documents="lines").path))
    cases = {
        "penstock, streaming": lambda: streamed(path, folder),
        "penstock, whole documents": lambda: streamed(path, folder, documents=corpus.SEPARATOR),
        "penstock, preprocessed": lambda: preprocessed(built),
    }
    if find_spec("datasets") and find_spec("transformers"):
        import datasets  # noqa: F401  (imported here so that the import is not measured)
        import transformers  # noqa: F401

        cases["datasets, streaming"] = lambda: hub_streamed(path, options.peer_seconds)
        cases["line reader, 2 workers"] = lambda: line_reader(path, options.peer_seconds)
    else:
        print("not measured: datasets and transformers are not installed")
    cases = {name: case for name, case in cases.items() if not options.only or name in options.only}
    figures = {name: [] for name in cases}
    for _ in range(options.repetitions):
        for name, case in cases.items():
            figures[name].append(measured(case))
    for name, result in figures.items():
        show(name, result)
    for peer in ("datasets, streaming", "line reader, 2 workers"):
        if {peer, "penstock, streaming"} <= set(figures):
            speeds = [
                statistics.median(each["speed"] for each in figures[name])
                for name in ("penstock, streaming", peer)
            ]
            print(f"penstock, streaming ÷ {peer}: {speeds[0] / speeds[1]:,.0f}")
    if options.only:
        return figures
    compared = prefix(path, options.compared_bytes, folder)
    rows = {n: forked(lambda n=n: same_rows(compared, folder, n)) for n in WORKERS}
    alike = len({json.dumps(each) for each in rows.values()}) == 1 and rows[0][2]
    print(
        f"rows with 0, 1, 2 and 8 threads and workers, {compared.stat().st_size:,} bytes, "
        f"{rows[0][1]:,} batches: {'equal, and each row once' if alike else rows}"
    )
    if not alike:
        raise SystemExit("The rows differ.")
    return figures


if __name__ == "__main__":
    main()
