"""What the catalog knows: where each dataset lives, its licence, its sizes and checksums.

Entries are data. A checksum stands here only where it was computed from the file itself
or is recorded alike by independent parties; where it is not known it is None, and then
the size, the archive's own checks and the receipt of the first fetch stand in for it.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from penstock.errors import SourceError

__all__ = ["ENTRIES", "TRAIN_SPLIT_RATIO", "Entry", "Remote", "Text", "find_entry"]

TRAIN_SPLIT_RATIO = 0.9
"""The share of a text that is trained on, where it comes as one file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A file of text that a fetch leaves in the directory."""

    name: str
    side: str | None
    """"train", "val" or "test"; None for a text that is to be split."""
    member: str = ""
    """Its path inside the archive; "" for what is no archive of several files."""
    num_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """A file as a server has it, and what becomes of it."""

    name: str
    """Under which it lies upstream and in mirrors."""
    urls: tuple[str, ...]
    """Tried in this order."""
    packing: Literal["plain", "zip", "gzip"] = "plain"
    num_bytes: int | None = None
    sha256: str | None = None
    texts: tuple[Text, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One dataset."""

    name: str
    title: str
    home: str
    licence: str
    remotes: tuple[Remote, ...]
    split: float | None = None
    """Where the text comes as one file: how much of it is for training."""
    documents: str = "auto"
    """What a document is in its files, as `penstock.build` takes it."""
    eos: bool = True
    """Whether documents end with the end token in stores that a fetch builds."""
    reader: str = ""
    """For sets of questions: what in `penstock.catalog` makes examples of the files."""

    @property
    def texts(self) -> tuple[Text, ...]:
        """All files that a fetch leaves, before any split."""
        return tuple(text for remote in self.remotes for text in remote.texts)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of all texts, where every size is known."""
        sizes = [text.num_bytes for text in self.texts]
        return sum(size for size in sizes if size) if all(sizes) else None

    @property
    def sides(self) -> tuple[str, ...]:
        """The names of its splits."""
        return ("train", "val") if self.split else tuple(text.side or "" for text in self.texts)


def _wikitext(name: str, sizes: dict[str, tuple[int | None, str | None]]) -> tuple[Text, ...]:
    """The three files of a WikiText archive; they are called "valid" there."""
    return tuple(
        Text(
            name=f"{side}.txt",
            side=side,
            member=f"{name}-raw/wiki.{'valid' if side == 'val' else side}.raw",
            num_bytes=num_bytes,
            sha256=sha256,
        )
        for side, (num_bytes, sha256) in sizes.items()
    )


_WIKITEXT_HOME = "https://huggingface.co/datasets/Salesforce/wikitext"
_WIKITEXT_LICENCE = "CC BY-SA 3.0 and GFDL (Wikipedia)"
_CS336 = "https://huggingface.co/datasets/stanford-cs336/owt-sample/resolve/main"

_GSM8K = "https://raw.githubusercontent.com/openai/grade-school-math"
_GSM8K_COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
_ARC = "https://huggingface.co/datasets/allenai/ai2_arc"
_ARC_COMMIT = "210d026faf9955653af8916fad021475a3f00453"
_MMLU = "https://huggingface.co/datasets/cais/mmlu"
_MMLU_COMMIT = "c30699e8356da336a370243923dbaf21066bb9fe"


def _gsm8k(split: str, num_bytes: int, sha256: str) -> Remote:
    """One file of GSM8K, as it lies in OpenAI's repository."""
    name = f"{split}.jsonl"
    known = {"num_bytes": num_bytes, "sha256": sha256}
    return Remote(
        name=name,
        urls=(f"{_GSM8K}/{_GSM8K_COMMIT}/grade_school_math/data/{name}",),
        texts=(Text(name=name, side=split, **known),),  # type: ignore[arg-type]
        **known,  # type: ignore[arg-type]
    )


_Known = dict[str, tuple[int | None, str | None]]
"""Size and checksum of each split, where they are known."""

# As the Hub records them for these revisions.
_ARC_EASY: _Known = {
    "train": (330_598, "b315db8a4be597dc7daa50a4e70d48dd7c990c32085629e6ccd8c926beaa80b5"),
    "validation": (None, None),
    "test": (None, "4160597d618ae851c7eb04e281574f3f654776216ac6b6641588d64527b47177"),
}
_ARC_CHALLENGE: _Known = {
    "train": (189_909, "e488c1587ffdcfc8443f916c53488a95cd471c5790e0746c6bfe4cecf20962cb"),
    "validation": (55_743, "395a5c88d1580d69855fbaee9450270578df1ad5af6259771cd0a42c20e99f05"),
    "test": (203_808, "62f03257e737aed263f55c6abf87c7bb0028a44a6bdd2a26eb1279eb42c1d1e9"),
}
_MMLU_ALL: _Known = {
    "auxiliary_train": (None, None),
    "dev": (None, "2b19bde1ed8ca6b482fb283abc90e8e0d9d228947029c0b91795d64b28b3bc3f"),
    "validation": (None, "66cdf0b090ccb657d18d13cd81e31fdc55c3467da9642ffb178653268a97c8ef"),
    "test": (3_504_718, "74a41822ce7d3def56e1682f958469c04642a5336a5ce912fa375fdb90fb25d7"),
}


def _parquet(home: str, revision: str, subset: str, splits: _Known) -> tuple[Remote, ...]:
    """The Parquet files of a set of questions on the Hugging Face Hub, one a split."""
    remotes = []
    for split, (num_bytes, sha256) in splits.items():
        name, side = f"{subset}/{split}-00000-of-00001.parquet", f"{subset}-{split}"
        text = Text(
            name=f"{side}.parquet", side=side, member=name, num_bytes=num_bytes, sha256=sha256
        )
        url = f"{home}/resolve/{revision}/{name}"
        remotes.append(Remote(name=name, urls=(url,), sha256=sha256, texts=(text,)))
    return tuple(remotes)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="tinyshakespeare",
        title="40,000 lines of Shakespeare's plays in one file",
        home="https://github.com/karpathy/char-rnn",
        licence="public domain (the text)",
        split=TRAIN_SPLIT_RATIO,
        eos=False,
        remotes=(
            Remote(
                name="input.txt",
                urls=(
                    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                    "tinyshakespeare/input.txt",
                ),
                num_bytes=1_115_394,
                sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                texts=(
                    Text(
                        name="tinyshakespeare.txt",
                        side=None,
                        num_bytes=1_115_394,
                        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                    ),
                ),
            ),
        ),
    ),
    # The archives used to be at s3.amazonaws.com/research.metamind.io, which is closed. The
    # checksums are those that were published for it; all copies below are byte for byte it.
    Entry(
        name="wikitext-2",
        title="Good and featured articles of Wikipedia, raw: no <unk>, case and numbers kept",
        home=_WIKITEXT_HOME,
        licence=_WIKITEXT_LICENCE,
        remotes=(
            Remote(
                name="wikitext-2-raw-v1.zip",
                urls=(
                    "https://huggingface.co/datasets/ggml-org/ci/resolve/"
                    "927b3642933080f1b0e811e2f916e14c292992f9/wikitext-2-raw-v1.zip",
                    "https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
                ),
                packing="zip",
                num_bytes=4_721_645,
                sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
                texts=_wikitext(
                    "wikitext-2",
                    {
                        "train": (
                            10_940_747,
                            "6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57",
                        ),
                        "val": (
                            1_146_846,
                            "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
                        ),
                        "test": (
                            1_290_590,
                            "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
                        ),
                    },
                ),
            ),
        ),
    ),
    Entry(
        name="wikitext-103",
        title="The same, fifty times as much: 28,475 articles, raw",
        home=_WIKITEXT_HOME,
        licence=_WIKITEXT_LICENCE,
        remotes=(
            Remote(
                name="wikitext-103-raw-v1.zip",
                urls=(
                    "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
                    "https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/"
                    "wikitext-103-raw-v1.zip",
                ),
                packing="zip",
                num_bytes=191_984_949,
                sha256="91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
                texts=_wikitext(
                    "wikitext-103",
                    {"train": (None, None), "val": (None, None), "test": (None, None)},
                ),
            ),
        ),
    ),
    Entry(
        name="openwebtext",
        title="The sample of OpenWebText of Stanford's CS336: 11 GiB and 277 MiB",
        home="https://huggingface.co/datasets/stanford-cs336/owt-sample",
        licence="CC0 (the collection); each page is its owner's",
        documents="<|endoftext|>",
        remotes=(
            Remote(
                name="owt_train.txt.gz",
                urls=(f"{_CS336}/owt_train.txt.gz",),
                packing="gzip",
                texts=(Text(name="owt_train.txt", side="train", num_bytes=11_920_511_059),),
            ),
            Remote(
                name="owt_valid.txt.gz",
                urls=(f"{_CS336}/owt_valid.txt.gz",),
                packing="gzip",
                texts=(Text(name="owt_valid.txt", side="val", num_bytes=289_998_753),),
            ),
        ),
    ),
    Entry(
        name="gsm8k",
        title="Word problems of grade school, solved step by step: 7,473 and 1,319",
        home="https://github.com/openai/grade-school-math",
        licence="MIT",
        reader="GSM8KDataLoader",
        remotes=(
            _gsm8k(
                "train",
                4_166_206,
                "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
            ),
            _gsm8k(
                "test",
                749_738,
                "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
            ),
        ),
    ),
    Entry(
        name="arc",
        title="Science questions of grade school with choices, easy and challenging: 7,787",
        home=_ARC,
        licence="CC BY-SA 4.0",
        reader="ARCDataLoader",
        remotes=(
            *_parquet(_ARC, _ARC_COMMIT, "ARC-Easy", _ARC_EASY),
            *_parquet(_ARC, _ARC_COMMIT, "ARC-Challenge", _ARC_CHALLENGE),
        ),
    ),
    Entry(
        name="mmlu",
        title="Questions with four choices from 57 subjects, and auxiliary ones to train on",
        home=_MMLU,
        licence="MIT",
        reader="MMLUDataLoader",
        remotes=_parquet(_MMLU, _MMLU_COMMIT, "all", _MMLU_ALL),
    ),
)


def find_entry(name: str) -> Entry:
    """The entry of that name.

    >>> find_entry("tinyshakespeare").remotes[0].name
    'input.txt'

    Raises:
        SourceError: the catalog has none.
    """
    known = {entry.name: entry for entry in ENTRIES}
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, 1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise SourceError(
            f"{name!r} is not in the catalog, which has {', '.join(known)}.{guess} "
            "See them with: penstock fetch --list"
        )
    return known[name]
