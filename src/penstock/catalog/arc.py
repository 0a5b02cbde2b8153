"""ARC: grade-school science questions, easy and challenging, with three to five choices.

Reads AI2's own files (`ARC-Easy/ARC-Easy-Train.jsonl`, where validation is called Dev) and the
Parquet files of the copy on the Hugging Face Hub (`ARC-Easy/train-00000-of-00001.parquet`).
"""

from typing import Any

from penstock.catalog.tasks import (
    PathLike,
    TaskRow,
    check_name,
    choice_example,
    find_files,
    read_rows,
)
from penstock.errors import SourceError

__all__ = ["ARCDataLoader"]

_SUBSETS = ("ARC-Easy", "ARC-Challenge")
_SPLITS = {"train": "Train", "validation": "Dev", "test": "Test"}  # our names: AI2's names


class ARCDataLoader:
    """Reads the examples of one split of ARC; see `penstock.catalog.tasks` for their keys.

    Args:
        subset: "ARC-Easy" or "ARC-Challenge".
        split: "train", "validation" or "test". "Dev", AI2's name for validation, works too.
        directory: Where the files are; `penstock.catalog.tasks` lists the default directories.
    """

    def __init__(
        self, subset: str = "ARC-Easy", split: str = "train", directory: PathLike | None = None
    ) -> None:
        self.subset = check_name("subset of ARC", subset, _SUBSETS)
        split = "validation" if split in ("Dev", "dev") else split
        self.split = check_name("split of ARC", split, tuple(_SPLITS))
        self.directory = directory

    def load_data(self) -> list[dict[str, Any]]:
        """Return all examples, in the order of the file.

        Raises:
            SourceError: the files are missing, or a row is malformed.
        """
        name, split = self.subset, self.split
        original = f"{name}-{_SPLITS[split]}.jsonl"
        patterns = [original, f"{name}/{original}", f"*/{name}/{original}"]
        # As `penstock fetch` names it; as in the Hub's repository; as the Hub converts it.
        patterns += [f"{name}-{split}.parquet", f"{name}/{split}-*.parquet"]
        patterns += [f"{name}/{split}/*.parquet"]
        files = find_files("arc", patterns, self.directory, f"{name} {split}")
        return [_example(row) for path in files for row in read_rows(path)]


def _example(row: TaskRow) -> dict[str, Any]:
    try:
        question, right = row.values["question"], row.values["answerKey"]
        # AI2 stores the choices inside the question, the Hub beside it.
        if isinstance(question, dict):
            choices = [each["text"] for each in question["choices"]]
            labels = [each["label"] for each in question["choices"]]
            question = question["stem"]
        else:
            choices, labels = row.values["choices"]["text"], row.values["choices"]["label"]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{row.where} is not a question of ARC: it has no {error}.") from None
    # Labels are A to E in most rows, 1 to 4 in a few; the answer uses the row's own labels.
    if right not in labels:
        raise SourceError(
            f"{row.where} has the choices {', '.join(map(str, labels))}, but marks {right!r} as "
            "right."
        )
    return choice_example(question, choices, labels.index(right), where=row.where)
