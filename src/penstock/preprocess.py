"""Converts text files to flat arrays of tokens, so that training starts without tokenizing.

    python -m penstock.preprocess
    python -m penstock.preprocess --train_file my.txt --val_file held_out.txt --output_dir tokens

    training_data/owt_train.txt ──► training_data/owt_train_preprocessed.npy
    training_data/owt_valid.txt ──► training_data/owt_val_preprocessed.npy

Each line is one document, blank lines are skipped, and an end token follows each document. The
arrays are 1-D, uint16 or uint32; `np.load(path, mmap_mode="r")` reads them without penstock. A
store, which `penstock build` makes, also records document ends, checksums and rejected records.

A long text is tokenized in parts. `owt_train_preprocessed.parts.json` then lists how many tokens
each part has, so that `shuffle="part"` gives the same order as a stream of the text.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from penstock.cli.terminal import message_of, print_error
from penstock.disk import header, sync_directory, write_file
from penstock.errors import MissingInputError, PenstockError, StoreError
from penstock.paths import expand_user
from penstock.rows.array_file import parts_file
from penstock.store.build import build
from penstock.store.reader import TokenStore

__all__ = ["main", "preprocess"]

# Tokens copied at once: 8 MB of uint16, so memory does not grow with the file.
_COPY_TOKENS = 1 << 22
_INTERRUPTED = 130


def preprocess(
    text: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: Any = "gpt2",
    documents: str = "lines",
    eos: bool | str = True,
    threads: int | None = None,
    overwrite: bool = False,
) -> int:
    """Tokenize a text file into one array file; returns the number of tokens.

    The array file appears under its name when it is complete. Until then, temporary files take up
    to twice its size on disk.

    Args:
        text: A text file, or anything else that `penstock.build` reads.
        output: The `.npy` file to write; the suffix is added if it is missing.
        tokenizer: A name, a path or an object; see `penstock.load_tokenizer`.
        documents: What a document is: "lines", "paragraphs", "file", or a separator.
        eos: Whether a document ends with the tokenizer's end token, or another token to use.
        threads: The number of slices tokenized at the same time.
        overwrite: Whether an existing file with other tokens is replaced.

    Raises:
        SourceError: the file does not exist, cannot be read, or contains no text.
        StoreError: `output` exists with other tokens, or is a directory.
    """
    path, target = expand_user(text), expand_user(output)
    if "://" not in os.fspath(text) and not path.is_file():
        raise MissingInputError(f"{path} does not exist (working directory: {Path.cwd()}).")
    if target.is_dir():
        raise StoreError(f"{target} is a directory. Name the file to write, such as tokens.npy.")
    if target.suffix != ".npy":  # as `numpy.save` does: readers know the format by the suffix
        target = target.with_name(f"{target.name}.npy")
    target.parent.mkdir(parents=True, exist_ok=True)
    # The temporary store is beside the target: only the disk that the user chose can become full.
    making = Path(tempfile.mkdtemp(prefix=".preprocess-", dir=target.parent))
    try:
        store = build(
            text,
            making / "store",
            tokenizer=tokenizer,
            documents=documents,
            eos=eos,
            workers=threads,
        )
        # The old file stays in place until the new one is complete. The directory is synced too, so
        # that the rename survives a power cut.
        # The parts of a store are separate files. An array file has one header, then all tokens.
        tokens = (
            store.tokens(start, min(start + _COPY_TOKENS, store.num_tokens))
            for start in range(0, store.num_tokens, _COPY_TOKENS)
        )
        if not overwrite and target.exists() and not _holds(target, store):
            raise StoreError(
                f"{target} exists with other tokens than the {store.num_tokens:,} of {text}. "
                "Remove it, name another file, or pass overwrite=True."
            )
        # First the parts: between the two, they do not match the old tokens, which is noticed.
        parts = [int(count) for count in store.part_tokens]
        write_file(parts_file(target), [json.dumps(parts).encode()])
        write_file(target, chain([header(store.dtype, (store.num_tokens,))], tokens))
        if len(parts) == 1:  # as of arrays of other programs, which have no list of parts
            parts_file(target).unlink()
        sync_directory(target.parent)
        return store.num_tokens
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _holds(target: Path, store: TokenStore) -> bool:
    """Return whether an array file has exactly the tokens of `store`."""
    try:
        array = np.load(target, mmap_mode="r")
    except (OSError, ValueError):
        return False  # not an array file
    if (array.dtype, array.shape) != (store.dtype, (store.num_tokens,)):
        return False
    starts = range(0, len(array), _COPY_TOKENS)
    blocks = ((start, min(start + _COPY_TOKENS, len(array))) for start in starts)
    return all(np.array_equal(array[a:b], store.tokens(a, b)) for a, b in blocks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.preprocess",
        description="Tokenize a training and a validation file into flat .npy arrays.",
    )
    option = parser.add_argument
    option("--preprocess", action="store_true", help="ignored: preprocessing always runs")
    option("--train_file", type=expand_user, default=Path("training_data/owt_train.txt"))
    option("--val_file", type=expand_user, default=Path("training_data/owt_valid.txt"))
    option("--output_dir", type=expand_user, default=Path("training_data"))
    option("--tokenizer", default="gpt2", help="a name or a path, as for penstock build")
    option("--documents", default="lines", help="lines, paragraphs, file or sep:SEPARATOR")
    option("--threads", type=int, default=None, help="default: one for each core")
    option("--overwrite", action="store_true", help="replace array files with other tokens")
    given = vars(parser.parse_args(arguments))
    settings = {name: given[name] for name in ("tokenizer", "documents", "threads", "overwrite")}
    sides = [(given["train_file"], "owt_train"), (given["val_file"], "owt_val")]
    # A missing file comes first: its error must not wait until the other one is tokenized.
    for text, name in sorted(sides, key=lambda side: side[0].is_file()):
        target = given["output_dir"] / f"{name}_preprocessed.npy"
        begun = time.monotonic()
        try:
            num_tokens = preprocess(text, target, **settings)
        except (PenstockError, OSError) as error:
            # Callers of `preprocess` have no flags, so the advice is added here.
            if isinstance(error, StoreError) and target.is_file():
                error.add_note("With this command, the option is --overwrite.")
            if not text.exists():
                error.add_note("Name another file with --train_file and --val_file.")
            if not text.exists() and text.name in ("owt_train.txt", "owt_valid.txt"):
                error.add_note(f"Or fetch it: penstock fetch openwebtext --output {text.parent}")
            print_error(type(error).__name__, message_of(error), as_json=False)
            return 1
        except KeyboardInterrupt:
            sys.stderr.write("Interrupted: stopped by Ctrl-C.\n")
            return _INTERRUPTED
        took = time.monotonic() - begun
        rate = num_tokens / max(took, 1e-9)
        sys.stdout.write(
            f"{text} -> {target}: {num_tokens:,} tokens in {took:.1f} s ({rate:,.0f} tokens/s)\n"
        )
    return 0


if __name__ == "__main__":
    if sys.stdout is None:  # closed by the caller (`>&-`)
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (`| head`) has closed the pipe
        code = 1
    # Exit at once: do not wait for a worker thread in native code, or write to the pipe again.
    os._exit(code)
