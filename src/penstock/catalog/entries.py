"""The datasets of the catalog: URLs, licences, sizes and checksums.

A checksum is recorded here only if it was computed from the file itself, or if independent
parties publish the same value. Otherwise it is None. Then a fetch relies on the SHA-256 that
the Hugging Face Hub reports, on the size, on the archive's own checks, and afterwards on the
receipt of the first fetch.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from penstock.errors import SourceError

__all__ = ["ENTRIES", "TRAIN_SPLIT_RATIO", "Entry", "EntryFile", "RemoteFile", "find_entry"]

TRAIN_SPLIT_RATIO = 0.9
"""The share of characters used for training, if a dataset is a single text file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryFile:
    """A file that a fetch writes into the target directory."""

    name: str
    split: str | None
    """"train", "val", "test" and so on; None if the text is split after the download."""
    member: str = ""
    """Its path inside the archive; "" if the remote file is not an archive of several files."""
    num_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A file on a server, and the files that a fetch makes from it."""

    name: str
    """Its name upstream and in mirrors."""
    urls: tuple[str, ...]
    """Tried in this order."""
    packing: Literal["plain", "zip", "gzip"] = "plain"
    num_bytes: int | None = None
    sha256: str | None = None
    files: tuple[EntryFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One dataset of the catalog."""

    name: str
    title: str
    home: str
    licence: str
    remotes: tuple[RemoteFile, ...]
    train_ratio: float | None = None
    """If the dataset is a single text file: the share of characters used for training."""
    documents: str = "auto"
    """How its files are cut into documents; the `documents=` of `penstock.build`."""
    eos: bool = True
    """Whether `build_stores` ends each document with the end token."""
    reader: str = ""
    """For question sets: the class in `penstock.catalog` that reads the files."""

    @property
    def files(self) -> tuple[EntryFile, ...]:
        """All files that a fetch writes, before a text is split."""
        return tuple(file for remote in self.remotes for file in remote.files)

    @property
    def num_bytes(self) -> int | None:
        """The size of all files together; None unless every size is known."""
        sizes = [file.num_bytes for file in self.files]
        return sum(size for size in sizes if size) if all(sizes) else None

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of its splits."""
        if self.train_ratio:
            return ("train", "val")
        return tuple(file.split or "" for file in self.files)


_WIKITEXT_HOME = "https://huggingface.co/datasets/Salesforce/wikitext"
_WIKITEXT_LICENCE = "CC BY-SA 3.0 and GFDL (Wikipedia)"
_OWT = "https://huggingface.co/datasets/stanford-cs336/owt-sample/resolve/main"

# Revisions are pinned: a branch may move, and then a checksum would be of another file.
_GSM8K = (
    "https://raw.githubusercontent.com/openai/grade-school-math/"
    "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data"
)
_ARC = "https://huggingface.co/datasets/allenai/ai2_arc"
_ARC_COMMIT = "210d026faf9955653af8916fad021475a3f00453"
_MMLU = "https://huggingface.co/datasets/cais/mmlu"
_MMLU_COMMIT = "c30699e8356da336a370243923dbaf21066bb9fe"


_Known = dict[str, tuple[int | None, str | None]]
"""Size and checksum of each split; None if unknown."""

_WIKITEXT_2: _Known = {
    "train": (10_940_747, "6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57"),
    "val": (1_146_846, "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7"),
    "test": (1_290_590, "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"),
}
# The archive's own checksum is known; zip checks each member by its CRC-32.
_WIKITEXT_103: _Known = {"train": (None, None), "val": (None, None), "test": (None, None)}
_GSM8K_FILES: _Known = {
    "train": (4_166_206, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "test": (749_738, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
}

# The sizes and checksums that the Hub reports for these revisions.
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


def _plain(
    url: str, split: str | None, num_bytes: int | None, sha256: str | None, *, name: str = ""
) -> RemoteFile:
    """Return a file that is kept as it is downloaded; called `name`, or as upstream."""
    upstream = url.rpartition("/")[2]
    file = EntryFile(name=name or upstream, split=split, num_bytes=num_bytes, sha256=sha256)
    return RemoteFile(name=upstream, urls=(url,), num_bytes=num_bytes, sha256=sha256, files=(file,))


def _wikitext(name: str, splits: _Known) -> tuple[EntryFile, ...]:
    """Return the three files of a WikiText archive, where "val" is called "valid"."""
    files = []
    for split, (num_bytes, sha256) in splits.items():
        member = f"{name}-raw/wiki.{'valid' if split == 'val' else split}.raw"
        file = EntryFile(
            name=f"{split}.txt", split=split, member=member, num_bytes=num_bytes, sha256=sha256
        )
        files.append(file)
    return tuple(files)


def _parquet(home: str, revision: str, subset: str, splits: _Known) -> tuple[RemoteFile, ...]:
    """Return the Parquet files of a question set on the Hugging Face Hub, one per split."""
    remotes = []
    for split, (num_bytes, sha256) in splits.items():
        # Subsets have files of the same name upstream, so the subset is part of the local name.
        name, local = f"{subset}/{split}-00000-of-00001.parquet", f"{subset}-{split}"
        file = EntryFile(
            name=f"{local}.parquet", split=local, member=name, num_bytes=num_bytes, sha256=sha256
        )
        url = f"{home}/resolve/{revision}/{name}"
        remotes.append(RemoteFile(name=name, urls=(url,), sha256=sha256, files=(file,)))
    return tuple(remotes)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="tinyshakespeare",
        title="40,000 lines of Shakespeare's plays in one file",
        home="https://github.com/karpathy/char-rnn",
        licence="public domain (the text)",
        train_ratio=TRAIN_SPLIT_RATIO,
        # Without an end token, as in nanoGPT: 301,966 and 36,059 GPT-2 tokens.
        eos=False,
        remotes=(
            _plain(
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
                "input.txt",
                None,
                1_115_394,
                "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                name="tinyshakespeare.txt",
            ),
        ),
    ),
    # The original archives, at s3.amazonaws.com/research.metamind.io, are gone. The checksums are
    # those published for them; the copies below are byte-identical.
    Entry(
        name="wikitext-2",
        title="Good and featured Wikipedia articles, raw: no <unk>, case and numbers kept",
        home=_WIKITEXT_HOME,
        licence=_WIKITEXT_LICENCE,
        remotes=(
            RemoteFile(
                name="wikitext-2-raw-v1.zip",
                urls=(
                    "https://huggingface.co/datasets/ggml-org/ci/resolve/"
                    "927b3642933080f1b0e811e2f916e14c292992f9/wikitext-2-raw-v1.zip",
                    "https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
                ),
                packing="zip",
                num_bytes=4_721_645,
                sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
                files=_wikitext("wikitext-2", _WIKITEXT_2),
            ),
        ),
    ),
    Entry(
        name="wikitext-103",
        title="The larger WikiText: 28,475 Wikipedia articles, raw",
        home=_WIKITEXT_HOME,
        licence=_WIKITEXT_LICENCE,
        remotes=(
            RemoteFile(
                name="wikitext-103-raw-v1.zip",
                urls=(
                    "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
                    "https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/"
                    "wikitext-103-raw-v1.zip",
                ),
                packing="zip",
                num_bytes=191_984_949,
                sha256="91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
                files=_wikitext("wikitext-103", _WIKITEXT_103),
            ),
        ),
    ),
    # The archives' checksums are not recorded: the branch is not pinned. The Hub reports the
    # SHA-256 of each archive when it is fetched, and the sizes of the texts are checked.
    Entry(
        name="openwebtext",
        title="OpenWebText sample of Stanford's CS336: 11 GiB and 277 MiB",
        home="https://huggingface.co/datasets/stanford-cs336/owt-sample",
        licence="CC0 (the collection); each page belongs to its owner",
        documents="<|endoftext|>",
        remotes=(
            RemoteFile(
                name="owt_train.txt.gz",
                urls=(f"{_OWT}/owt_train.txt.gz",),
                packing="gzip",
                files=(EntryFile(name="owt_train.txt", split="train", num_bytes=11_920_511_059),),
            ),
            RemoteFile(
                name="owt_valid.txt.gz",
                urls=(f"{_OWT}/owt_valid.txt.gz",),
                packing="gzip",
                files=(EntryFile(name="owt_valid.txt", split="val", num_bytes=289_998_753),),
            ),
        ),
    ),
    Entry(
        name="gsm8k",
        title="Grade-school math problems solved step by step: 7,473 and 1,319",
        home="https://github.com/openai/grade-school-math",
        licence="MIT",
        reader="GSM8KDataLoader",
        remotes=tuple(
            _plain(f"{_GSM8K}/{split}.jsonl", split, *known)
            for split, known in _GSM8K_FILES.items()
        ),
    ),
    Entry(
        name="arc",
        title="Grade-school science questions with choices, easy and challenging: 7,787",
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
        title="Questions with four choices from 57 subjects, and auxiliary training questions",
        home=_MMLU,
        licence="MIT",
        reader="MMLUDataLoader",
        remotes=_parquet(_MMLU, _MMLU_COMMIT, "all", _MMLU_ALL),
    ),
)


def find_entry(name: str) -> Entry:
    """Return the entry called `name`.

    >>> find_entry("tinyshakespeare").remotes[0].name
    'input.txt'

    Raises:
        SourceError: the catalog has no such entry.
    """
    known = {entry.name: entry for entry in ENTRIES}
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, 1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise SourceError(
            f"{name!r} is not in the catalog, which has {', '.join(known)}.{guess} "
            "List them with: penstock fetch --list"
        )
    return known[name]
