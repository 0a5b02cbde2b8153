"""Download TinyShakespeare, split it, and tokenize it.

    python examples/prepare_data.py
    python examples/prepare_data.py --from ../shared/data/tinyshakespeare   # without a network

It writes to `data/`:

    tinyshakespeare.txt   the downloaded text, unchanged
    train.txt, val.txt    the first 90 % of its characters, and the rest
    train/, val/          their tokens, as stores for a training run

A file with the right checksum is not downloaded again, and a finished store is not built again,
so a second run takes almost no time.
"""

import argparse
import sys
from pathlib import Path

import penstock as ps
from penstock.catalog import TRAIN_SPLIT_RATIO, build_stores, fetch
from penstock.errors import PenstockError


def main() -> int:
    """Prepare the data; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("data"), help="directory to write to")
    parser.add_argument("--from", dest="source", help="directory or URL of a mirror")
    parser.add_argument("--tokenizer", default="gpt2")
    options = parser.parse_args()

    try:
        fetched = fetch(
            "tinyshakespeare", options.output, source=options.source, split=TRAIN_SPLIT_RATIO
        )
    except PenstockError as error:  # no network, a wrong file or a full disk
        print("\n".join([str(error), *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 1
    raw = fetched.raw or options.output
    print(f"raw data: {raw}, {raw.stat().st_size:,} bytes")
    for side, path in fetched.files.items():
        print(f"{side}: {path}, {len(path.read_bytes().decode()):,} characters")

    tokenizer = ps.load_tokenizer(options.tokenizer)
    stores = build_stores(fetched, tokenizer=tokenizer)
    print(f"tokenizer: {tokenizer.name}, vocabulary of {tokenizer.vocab_size:,}")
    for side, store in stores.items():
        print(f"{side}: {store.num_tokens:,} tokens in {store.path}")

    # Training reads pairs: x is a row of tokens, and y is the same row, one token later.
    x, y = next(iter(ps.Loader(ps.Windows(stores["train"], 64), 1, format="tuple", seed=1)))
    print(f"x {tuple(x.shape)}: {tokenizer.decode(x[0].numpy())!r:.60}…")
    print(f"y {tuple(y.shape)}: {tokenizer.decode(y[0].numpy())!r:.60}…")
    return 0


if __name__ == "__main__":
    sys.exit(main())
