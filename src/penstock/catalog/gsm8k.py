"""GSM8K: word problems of grade school, solved step by step.

Reads OpenAI's own files (`train.jsonl`, `test.jsonl`) and the Parquet files of its copy on the
Hugging Face Hub (`main/train-00000-of-00001.parquet`).
"""

from typing import Any

from penstock.catalog.tasks import PathLike, Row, find_files, known, rows_of
from penstock.errors import SourceError

__all__ = ["GSM8KDataLoader"]

_MARK = "####"  # stands before the number that a solution comes to


class GSM8KDataLoader:
    """The examples of one split of GSM8K; see `penstock.catalog.tasks` for their keys.

    `answer` is the number that a solution comes to, without commas; the assistant's message
    is the whole solution as it lies upstream, calculations in `<<…>>` and `####` included.
    There are no choices.

    Args:
        split: "train" or "test".
        directory: Where the files are; see `penstock.catalog.tasks` for where else.
    """

    def __init__(self, split: str = "train", directory: PathLike | None = None) -> None:
        self.split = known("split of GSM8K", split, ("train", "test"))
        self.directory = directory

    def load_data(self) -> list[dict[str, Any]]:
        """All examples, in the order of the file.

        Raises:
            SourceError: the files are not there, or a row is not as it should be.
        """
        split = self.split
        patterns = [f"{split}.jsonl", f"grade_school_math/data/{split}.jsonl"]
        patterns += [f"main/{split}-*.parquet", f"{split}-*.parquet", f"main/{split}/*.parquet"]
        files = find_files("gsm8k", patterns, self.directory, f"GSM8K {split}")
        return [_example(row) for path in files for row in rows_of(path)]


def _example(row: Row) -> dict[str, Any]:
    try:
        question, solution = row.values["question"], row.values["answer"]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{row.where} is not a problem of GSM8K: it has no {error}.") from None
    _, mark, number = solution.rpartition(_MARK) if isinstance(solution, str) else ("", "", "")
    if not mark:
        raise SourceError(f"{row.where} has a solution without {_MARK}, so its answer is not told.")
    return {
        "question": question,
        "choices": [],
        "answer": number.strip().replace(",", ""),
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": solution},
        ],
    }
