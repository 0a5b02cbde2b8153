"""Text files to flat arrays of tokens, for training that starts without tokenizing.

    python -m penstock.preprocess
    python -m penstock.preprocess --train_file my.txt --val_file held_out.txt --output_dir tokens

    training_data/owt_train.txt ──► training_data/owt_train_preprocessed.npy
    training_data/owt_valid.txt ──► training_data/owt_val_preprocessed.npy

One document a line, blank lines skipped, an end token after each. The arrays are 1-D, uint16
or uint32, and `np.load(path, mmap_mode="r")` reads them without penstock. A store knows more
(where documents end, checksums, what was rejected): `penstock build` makes one.
"""

import argparse
import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock.errors import PenstockError, SourceError
from penstock.store.build import build
from penstock.store.files import sync_directory, write_file
from penstock.store.npy import header
from penstock.store.reader import TokenStore

__all__ = ["main", "preprocess"]

_NAMES = {"train": "owt_train_preprocessed.npy", "val": "owt_val_preprocessed.npy"}
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
) -> int:
    """Tokenize a text file into one array file; returns how many tokens there are.

    The file appears under its name when it is complete. Until then it needs twice its room.

    Args:
        text: A file of text, as `penstock.build` takes it.
        output: The `.npy` file to write; one that is there is replaced.
        tokenizer: A name, a path or an object; see `penstock.load_tokenizer`.
        documents: What a document is: "lines", "paragraphs", "file", or a separator.
        eos: Whether a document ends with the tokenizer's end token, or which token it is.
        threads: How many slices are tokenized at once.

    Raises:
        SourceError: the file is not there, cannot be read as asked, or holds no text.
    """
    path, target = Path(text), Path(output)
    if "://" not in os.fspath(text) and not path.is_file():
        raise SourceError(
            f"{path} does not exist (working directory: {Path.cwd()}). Name another file with "
            "--train_file and --val_file, or fetch the usual ones: penstock fetch openwebtext "
            f"--output {path.parent}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: so that a disk that is full is the one the user named.
    making = Path(tempfile.mkdtemp(prefix=".preprocess-", dir=target.parent))
    try:
        store = build(
            text,
            making / "store",
            tokenizer=tokenizer,
            documents=documents,
            eos=eos,
            threads=threads,
        )
        if not store.num_tokens:
            raise SourceError(f"{path} holds no document: nothing but blank records.")
        write_file(target, _pieces(store))
        sync_directory(target.parent)
        return store.num_tokens
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _pieces(store: TokenStore) -> Iterator[Any]:
    """The bytes of an array file of all tokens."""
    yield header(store.dtype, (store.num_tokens,))
    for start in range(0, store.num_tokens, _COPY_TOKENS):
        yield store.tokens(start, min(start + _COPY_TOKENS, store.num_tokens))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.preprocess",
        description="Tokenize a training and a validation file into flat .npy arrays.",
    )
    parser.add_argument("--preprocess", action="store_true", help="what is done in any case")
    parser.add_argument("--train_file", type=Path, default=Path("training_data/owt_train.txt"))
    parser.add_argument("--val_file", type=Path, default=Path("training_data/owt_valid.txt"))
    parser.add_argument("--output_dir", type=Path, default=Path("training_data"))
    parser.add_argument("--tokenizer", default="gpt2", help="as in penstock build")
    parser.add_argument("--documents", default="lines", help="lines, paragraphs, file, a separator")
    parser.add_argument("--threads", type=int, default=None, help="one a core if not given")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(arguments)
    for side, text in (("train", options.train_file), ("val", options.val_file)):
        target = options.output_dir / _NAMES[side]
        begun = time.monotonic()
        try:
            num_tokens = preprocess(
                text,
                target,
                tokenizer=options.tokenizer,
                documents=options.documents,
                threads=options.threads,
            )
        except (PenstockError, OSError) as error:
            told = "\n".join([str(error), *getattr(error, "__notes__", [])])
            sys.stderr.write(f"{type(error).__name__}: {told}\n")
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


def _run() -> NoReturn:
    """Run the command as a process, and end it."""
    if sys.stdout is None:  # closed by the caller (`>&-`)
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        code = main()
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:  # else the reader (`| head`) has left
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(1)
    if code:
        os._exit(code)  # a worker may be deep in native code
    sys.exit(0)


if __name__ == "__main__":
    _run()
