"""GSM8K: grade-school math problems, solved step by step.

Reads OpenAI's own files (`train.jsonl`, `test.jsonl`) and the Parquet files of the copy on the
Hugging Face Hub (`main/train-00000-of-00001.parquet`).
"""

from typing import Any

from penstock.catalog.tasks import PathLike, TaskRow, check_name, example, find_files, read_rows
from penstock.errors import SourceError

__all__ = ["GSM8KDataLoader"]

_MARK = "####"  # precedes the final number of a solution


class GSM8KDataLoader:
    """Reads the examples of one split of GSM8K; see `penstock.catalog.tasks` for their keys.

    `answer` is the final number of the solution, without commas. The assistant's message is the
    whole solution as published, including calculations in `<<…>>` and `####`. There are no
    choices.

    Args:
        split: "train" or "test".
        directory: Where the files are; `penstock.catalog.tasks` lists the default directories.
    """

    def __init__(self, split: str = "train", directory: PathLike | None = None) -> None:
        self.split = check_name("split of GSM8K", split, ("train", "test"))
        self.directory = directory

    def load_data(self) -> list[dict[str, Any]]:
        """Return all examples, in the order of the file.

        Raises:
            SourceError: the files are missing, or a row is malformed.
        """
        split = self.split
        patterns = [f"{split}.jsonl", f"grade_school_math/data/{split}.jsonl"]
        # As in the Hub's repository, without its folder, and as the Hub converts it.
        patterns += [f"main/{split}-*.parquet", f"{split}-*.parquet", f"main/{split}/*.parquet"]
        files = find_files("gsm8k", patterns, self.directory, f"GSM8K {split}")
        return [_example(row) for path in files for row in read_rows(path)]


def _example(row: TaskRow) -> dict[str, Any]:
    try:
        question, solution = row.values["question"], row.values["answer"]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{row.where} is not a problem of GSM8K: it has no {error}.") from None
    _, mark, number = solution.rpartition(_MARK) if isinstance(solution, str) else ("", "", "")
    if not mark:
        raise SourceError(
            f"{row.where} has a solution without {_MARK}, which must precede its final number."
        )
    return example(question, number.strip().replace(",", ""), question, solution)
