"""Make a corpus of the source code and documentation on this machine.

    python benchmarks/corpus.py --bytes 1200000000 [ROOT ...]

writes benchmarks/data/corpus.txt (documents separated by <|endoftext|>), corpus.jsonl and
corpus.parquet with the same documents. HTML is reduced to its text. Equal files are used once, so
no document is repeated. If there is less text than requested, a message says so.
"""

import argparse
import hashlib
import html
import json
import os
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

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
    for _, (folder, name) in sorted(paths.items()):
        path = Path(folder, name)
        try:
            if path.is_symlink() or not 200 <= path.stat().st_size <= 2_000_000:
                continue
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if path.suffix.lower() in (".html", ".xhtml"):
            text = html.unescape(_TAG.sub(" ", text))
            text = _LINES.sub("\n", _SPACES.sub(" ", text)).strip()
        digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()
        if digest in seen or len(text) < 200 or SEPARATOR in text:
            continue
        seen.add(digest)
        yield text.encode(errors="replace").decode()


def write(num_bytes, roots, folder=DATA):
    """Write the three files; returns their number of bytes of text."""
    folder.mkdir(exist_ok=True)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    total, number, held = 0, 0, []
    with (
        (folder / "corpus.txt").open("w", encoding="utf-8", newline="") as plain,
        (folder / "corpus.jsonl").open("w", encoding="utf-8", newline="") as lines,
        pq.ParquetWriter(folder / "corpus.parquet", schema, compression="zstd") as table,
    ):
        for text in documents(roots):
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
    if total < num_bytes:
        print(f"less than the requested {num_bytes:,} bytes: pass more directories")
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--bytes", type=int, default=1_200_000_000)
    parser.add_argument("roots", nargs="*", default=ROOTS)
    options = parser.parse_args()
    write(options.bytes, options.roots)
