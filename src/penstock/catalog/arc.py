"""ARC: science questions of grade school, easy and challenging, with three to five choices.

Reads AI2's own files (`ARC-Easy/ARC-Easy-Train.jsonl`, where validation is called Dev) and the
Parquet files of its copy on the Hugging Face Hub (`ARC-Easy/train-00000-of-00001.parquet`).
"""

from typing import Any

from penstock.catalog.tasks import PathLike, Row, choice_example, find_files, known, rows_of
from penstock.errors import SourceError

__all__ = ["ARCDataLoader"]

_SUBSETS = ("ARC-Easy", "ARC-Challenge")
_SPLITS = {"train": "Train", "validation": "Dev", "test": "Test"}  # ours: AI2's


class ARCDataLoader:
    """The examples of one split of ARC; see `penstock.catalog.tasks` for their keys.

    Args:
        subset: "ARC-Easy" or "ARC-Challenge".
        split: "train", "validation" or "test"; "Dev" is AI2's word for validation.
        directory: Where the files are; see `penstock.catalog.tasks` for where else.
    """

    def __init__(
        self, subset: str = "ARC-Easy", split: str = "train", directory: PathLike | None = None
    ) -> None:
        self.subset = known("subset of ARC", subset, _SUBSETS)
        split = "validation" if split in ("Dev", "dev") else split
        self.split = known("split of ARC", split, tuple(_SPLITS))
        self.directory = directory

    def load_data(self) -> list[dict[str, Any]]:
        """All examples, in the order of the file.

        Raises:
            SourceError: the files are not there, or a row is not as it should be.
        """
        name, split = self.subset, self.split
        original = f"{name}-{_SPLITS[split]}.jsonl"
        patterns = [original, f"{name}/{original}", f"*/{name}/{original}"]
        patterns += [f"{name}-{split}.parquet", f"{name}/{split}-*.parquet"]
        patterns += [f"{name}/{split}/*.parquet"]
        files = find_files("arc", patterns, self.directory, f"{name} {split}")
        return [_example(row) for path in files for row in rows_of(path)]


def _example(row: Row) -> dict[str, Any]:
    """One row: AI2 puts the choices under the question, the Hub beside it."""
    try:
        question, right = row.values["question"], row.values["answerKey"]
        if isinstance(question, dict):
            choices = [each["text"] for each in question["choices"]]
            labels = [each["label"] for each in question["choices"]]
            question = question["stem"]
        else:
            choices, labels = row.values["choices"]["text"], row.values["choices"]["label"]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{row.where} is not a question of ARC: it has no {error}.") from None
    if right not in labels:
        raise SourceError(
            f"{row.where} has the choices {', '.join(map(str, labels))}, and {right!r} is said to "
            "be right."
        )
    return choice_example(question, choices, labels.index(right), where=row.where)
