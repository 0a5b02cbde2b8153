"""Make a corpus of the source code and documentation on this machine.

    python benchmarks/corpus.py --bytes 1200000000 [ROOT ...]

writes benchmarks/data/corpus.txt (documents separated by <|endoftext|>), corpus.jsonl and
corpus.parquet with the same documents. HTML is reduced to its text. Equal files are used once. If
there is less text than requested, all documents follow again, in another order, and a message says
how many bytes are different.
"""

import argparse
import hashlib
import html
import itertools
import json
import os
import random
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

GROUPS = 8
DATA = Path(__file__).parent / "data"
SEPARATOR = "<|endoftext|>"
ROOTS = ("/usr/share/doc", "/usr/share", "/usr/lib", "/usr/include", sys.base_prefix, "/usr/src")
SUFFIXES = frozenset(
    (
        *(".c", ".cc", ".cpp", ".h", ".hpp", ".html", ".java", ".md", ".pl", ".pm"),
        *(".py", ".pyi", ".rs", ".rst", ".tcl", ".txt", ".xhtml"),
    )
)
_TAG = re.compile(r"<script.*?</script>|<style.*?</style>|<[^>]*>", re.S | re.I)
_SPACES = re.compile(r"[ \t\u00a0]+")
_LINES = re.compile(r" ?\n[ \n]*")


def documents(roots):
    """Different texts of 200 bytes to 2 MB, in an order that mixes the kinds of files."""
    seen = set()
    paths = {}
    for root in roots:
        for folder, _, names in os.walk(root):
            if "/proc/" not in folder:
                for name in names:
                    if Path(name).suffix.lower() in SUFFIXES:
                        key = f"{folder}/{name}".encode(errors="replace")
                        paths[hashlib.blake2b(key).digest()] = (folder, name)
    ordered = [Path(folder, name) for _, (folder, name) in sorted(paths.items())]
    with ProcessPoolExecutor() as pool:
        # A few at a time: when the caller stops, the pool finishes all that it was given.
        for start in range(0, len(ordered), 4096):
            for text in pool.map(_text, ordered[start : start + 4096], chunksize=32):
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                if digest not in seen and len(text) >= 200 and SEPARATOR not in text:
                    seen.add(digest)
                    yield text


def _text(path):
    """The text of a file; empty if it is not UTF-8, too short or too long."""
    try:
        if path.is_symlink() or not 200 <= path.stat().st_size <= 2_000_000:
            return ""
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return ""
    if path.suffix.lower() in (".html", ".xhtml"):
        text = html.unescape(_TAG.sub(" ", text))
        text = _LINES.sub("\n", _SPACES.sub(" ", text)).strip()
    return text.encode(errors="replace").decode()


def in_other_orders(texts):
    """All texts, again and again, each time in another order.

    They are divided into eight groups, and each group is shuffled again. So at least seven eighths
    of all texts come between two copies of a text.
    """
    groups = [texts[number::GROUPS] for number in range(GROUPS)]
    chance = random.Random(0)
    return itertools.chain.from_iterable(
        chance.sample(group, len(group)) for group in itertools.cycle(groups)
    )


def repeated(texts):
    """The texts, and then all of them in other orders, without an end."""
    seen = []
    for text in texts:
        seen.append(text)
        yield text
    if not seen:
        raise SystemExit("no text was found: name other directories")
    print(f"{sum(len(text.encode()) for text in seen):,} bytes of different documents")
    yield from in_other_orders(seen)


def write(num_bytes, roots, folder=DATA):
    """Write the three files; returns their number of bytes of text."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    total, number, held = 0, 0, []
    with (
        (folder / "corpus.txt").open("w", encoding="utf-8", newline="") as plain,
        (folder / "corpus.jsonl").open("w", encoding="utf-8", newline="") as lines,
        pq.ParquetWriter(folder / "corpus.parquet", schema, compression="zstd") as table,
    ):
        for text in repeated(documents(roots)):
            plain.write(text + SEPARATOR)
            lines.write(json.dumps({"id": number, "text": text}, ensure_ascii=False) + "\n")
            held.append({"id": number, "text": text})
            number += 1
            total += len(text.encode())
            if len(held) == 2_000:
                table.write_batch(pa.RecordBatch.from_pylist(held, schema))
                held = []
            if total >= num_bytes:
                break
        if held:
            table.write_batch(pa.RecordBatch.from_pylist(held, schema))
    print(f"{number:,} documents, {total:,} bytes in {folder}")
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--bytes", type=int, default=1_200_000_000)
    parser.add_argument("roots", nargs="*", default=ROOTS)
    options = parser.parse_args()
    write(options.bytes, options.roots)
