"""Sets of several files: a directory of token files, or a pattern such as `data/train_*.bin`.

    train_1.bin  train_2.bin  train_10.bin      in natural order: 2 is before 10
    train_1.bin  val_1.bin                      a directory with both is refused

A directory may have files of several splits or corpora, and one set of all of them would train on
the validation data. So all files of a directory must have one name, apart from the digits in it. A
pattern is taken as it is.
"""

import glob
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import digits

from penstock.errors import MissingStoreError, StoreError
from penstock.formats.index_file import read_index, value
from penstock.formats.megatron import megatron_files

# A file that belongs to another one, by the ending that is replaced by that of the other one.
_COMPANIONS = {
    ".ds.index": ".ds",
    ".ds.loss": ".ds",
    ".ds.metadata": ".ds",
    ".idx": ".bin",
    ".csv.gz": ".npy",
}
_SHOWN = 5


def is_pattern(path: Path) -> bool:
    """Return whether a path is a pattern, and not the name of a file or of Megatron's files."""
    is_name = path.exists() or all(each.exists() for each in megatron_files(path))
    return glob.has_magic(str(path)) and not is_name


def found_by(pattern: Path) -> Iterator[Path]:
    """Yield the paths that a pattern matches; names of directories that exist are no patterns."""
    root = next((each for each in pattern.parents if each.exists()), Path())
    whole = Path(glob.escape(str(root))) / pattern.relative_to(root)
    return map(Path, glob.iglob(str(whole), recursive=True))  # noqa: PTH207


def natural_key(path: Path) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers in paths by their value.

    >>> sorted([Path("a10"), Path("a2"), Path("a1b")], key=natural_key)
    [PosixPath('a1b'), PosixPath('a2'), PosixPath('a10')]
    """
    pieces = re.findall(r"[0-9]+|[^0-9]+", str(path))
    return [(0, int(each), each) if each[0] in digits else (1, 0, each) for each in pieces]


def matching(pattern: Path) -> list[Path]:
    """Return the files that a pattern matches, in natural order.

    Raises:
        MissingStoreError: it matches no file.
        StoreError: it matches a directory.
    """
    files = without_companions([*found_by(pattern)])
    if not files:
        raise MissingStoreError(f"{pattern} matches no file (working directory: {Path.cwd()}).")
    if directories := [each for each in files if each.is_dir()]:
        raise StoreError(
            f"{pattern} matches the directory {directories[0]}. Use a pattern of files, or open "
            "each directory and pass a list of them to Windows, Packs or Documents."
        )
    return sorted(files, key=natural_key)


def without_companions(paths: Sequence[Path]) -> list[Path]:
    """Return the paths without indices, masks and tables of other paths among them."""
    known = set(paths)
    return [each for each in paths if not (_owners(each) & known)]


def _owners(path: Path) -> set[Path]:
    """Return the files that a file may belong to, by its name."""
    return {
        path.with_name(path.name.removesuffix(ending) + other)
        for ending, other in _COMPANIONS.items()
        if path.name.endswith(ending)
    }


def files_in(directory: Path) -> list[Path]:
    """Return the files of a directory without hidden ones, in natural order."""
    found = [each for each in directory.iterdir() if not each.name.startswith(".")]
    # A link whose file is missing is kept, so that its reader refuses it.
    files = without_companions([each for each in found if not each.is_dir()])
    return sorted(files, key=natural_key)


def token_files_in(directory: Path, recognised: Callable[[Path], list[str]]) -> list[Path]:
    """Return the token files of a directory, in natural order.

    Raises:
        StoreError: the directory has other files, other directories, or files of several names.
    """
    _refuse_splits(directory)
    files = files_in(directory)
    inside = sorted(each.name for each in directory.iterdir() if each.is_dir())
    inside = [each for each in inside if not each.startswith(".")]
    if not files or inside:
        shown = f" It has the directories {', '.join(inside[:_SHOWN])}." if inside else ""
        raise StoreError(
            f"{directory} is a directory, and not one of token files only.{shown} Pass one "
            f"directory, or a pattern such as '{directory}/**/*.bin'. A store is opened with "
            "TokenStore."
        )
    others = [each.name for each in files if not recognised(each)]
    if others:
        raise StoreError(
            f"{directory} has {len(others):,} of {len(files):,} files without the contents of a "
            f"known format: {', '.join(others[:_SHOWN])}. Pass a pattern that matches only token "
            f"files, such as '{directory}/*.bin'. Files without a header need format=."
        )
    stems = sorted({re.sub(r"[0-9]+", "*", each.name) for each in files})
    if len(stems) > 1:
        raise StoreError(
            f"{directory} has files of several names: {', '.join(stems[:_SHOWN])}. They may be of "
            f"several splits, so pass a pattern, such as '{directory / stems[0]}', or "
            f"'{directory}/*' for all."
        )
    return files


def _refuse_splits(directory: Path) -> None:
    """Raise if a directory is a Hugging Face DatasetDict, which has a directory for each split."""
    index = directory / "dataset_dict.json"
    if not index.is_file():
        return
    splits = [str(each) for each in value(read_index(index), "splits", list, index)]
    raise StoreError(
        f"{directory} is a Hugging Face DatasetDict with the splits {', '.join(splits)}. Pass one "
        f"of them, for example {directory / (splits or ['train'])[0]}."
    )
