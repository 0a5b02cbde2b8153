"""MMLU: questions with four choices from 57 subjects.

Reads the CSV files of its authors (`test/anatomy_test.csv`: no header, the answer is a letter),
CSV files with a header (`question,choice0,…,answer`, the answer is a number from 0), and the
Parquet files of the copy on the Hugging Face Hub, per subject or all in one file.
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

__all__ = ["SUBJECTS", "MMLUDataLoader"]

SUBJECTS = tuple(
    """
    abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology
    college_chemistry college_computer_science college_mathematics college_medicine
    college_physics computer_security conceptual_physics econometrics electrical_engineering
    elementary_mathematics formal_logic global_facts high_school_biology high_school_chemistry
    high_school_computer_science high_school_european_history high_school_geography
    high_school_government_and_politics high_school_macroeconomics high_school_mathematics
    high_school_microeconomics high_school_physics high_school_psychology high_school_statistics
    high_school_us_history high_school_world_history human_aging human_sexuality
    international_law jurisprudence logical_fallacies machine_learning management marketing
    medical_genetics miscellaneous moral_disputes moral_scenarios nutrition philosophy
    prehistory professional_accounting professional_law professional_medicine
    professional_psychology public_relations security_studies sociology us_foreign_policy
    virology world_religions
    """.split()  # noqa: SIM905  (one name per line would take 57)
)
"""The subjects, under their upstream names."""

# Our names, and the names in the authors' CSV files.
_SPLITS = {"auxiliary_train": "", "dev": "dev", "validation": "val", "test": "test"}
# Column names that CSV headers use.
_QUESTION, _ANSWER = ("question", "input"), ("answer", "target")


class MMLUDataLoader:
    """Reads the examples of one split of MMLU; see `penstock.catalog.tasks` for their keys.

    Args:
        subset: A subject, or "all".
        split: "auxiliary_train" (only with subset="all"), "dev", "validation" or "test".
        directory: Where the files are; `penstock.catalog.tasks` lists the default directories.
    """

    def __init__(
        self, subset: str = "all", split: str = "test", directory: PathLike | None = None
    ) -> None:
        self.subset = check_name("subject of MMLU", subset, (*SUBJECTS, "all"))
        self.split = check_name("split of MMLU", split, tuple(_SPLITS))
        if split == "auxiliary_train" and subset != "all":
            raise SourceError(
                f'auxiliary_train is not divided into subjects; got {subset!r}. Use subset="all".'
            )
        self.directory = directory

    def load_data(self) -> list[dict[str, Any]]:
        """Return all examples, in the order of the files.

        Raises:
            SourceError: the files are missing, or a row is malformed.
        """
        wanted = f"MMLU {self.subset} {self.split}"
        files = find_files("mmlu", self._patterns(), self.directory, wanted)
        rows = [row for path in files for row in _without_header(list(read_rows(path)))]
        # The Hub's file of all subjects has a subject column; files of one subject have none.
        if self.subset != "all":
            rows = [
                row for row in rows if (row.values.get("subject") or self.subset) == self.subset
            ]
            if not rows:
                raise SourceError(f"{files[0]} has no question of the subject {self.subset!r}.")
        return [_example(row) for row in rows]

    def _patterns(self) -> list[str]:
        name, split, short = self.subset, self.split, _SPLITS[self.split]
        if split == "auxiliary_train":
            tables = ["auxiliary_train/*.csv", "*/auxiliary_train/*.csv"]
        else:
            each = "*" if name == "all" else name
            tables = [f"{place}{each}_{short}.csv" for place in (f"{short}/", "", f"*/{short}/")]
        # The Hub's files: one folder per subject, or all subjects in one file.
        parquet = [f"{name}/{split}-*.parquet", f"{name}/{split}/*.parquet"]
        return [*tables, *parquet, f"all/{split}-*.parquet", f"all-{split}.parquet"]


def _without_header(rows: list[TaskRow]) -> list[TaskRow]:
    """Return CSV rows as dicts of question, choices and answer, without the header."""
    if not rows or isinstance(rows[0].values, dict):
        return rows
    # The authors' files have no header. A header is recognised by both its ends, as a question
    # alone might be "question".
    first = [cell.strip().lower() for cell in rows[0].values]
    has_header = first[0] in _QUESTION and first[-1] in _ANSWER
    found = []
    for values, where in rows[1:] if has_header else rows:
        if len(values) != len(first) or len(values) < 4:
            raise SourceError(
                f"{where} has {len(values)} cells, but the first row has {len(first)}."
            )
        question, *choices, answer = values
        found.append(TaskRow({"question": question, "choices": choices, "answer": answer}, where))
    return found


def _example(row: TaskRow) -> dict[str, Any]:
    values = row.values
    # The Hub's auxiliary_train has each question inside a struct called "train".
    if set(values) == {"train"}:
        values = values["train"]
    try:
        question, choices, given = values["question"], values["choices"], values["answer"]
    except KeyError as error:
        raise SourceError(f"{row.where} is not a question of MMLU: it has no {error}.") from None
    answer = str(given).strip().upper()
    if not answer.isdecimal() and (len(answer) != 1 or not "A" <= answer <= "J"):
        raise SourceError(
            f"{row.where} has the answer {given!r}; an answer must be a letter or a number."
        )
    # Numbers count from 0, so "1" and "B" are the same choice.
    right = int(answer) if answer.isdecimal() else ord(answer) - ord("A")
    return choice_example(question, choices, right, where=row.where)
