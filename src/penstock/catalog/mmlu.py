"""MMLU: questions with four choices from 57 subjects.

Reads the CSV files of its authors (`test/anatomy_test.csv`: no header, a letter as answer), CSV
with a header (`question,choice0,…,answer`, a number from 0 as answer), and the Parquet files of
its copy on the Hugging Face Hub, by subject or all in one.
"""

from typing import Any

from penstock.catalog.tasks import PathLike, Row, choice_example, find_files, known, rows_of
from penstock.errors import SourceError

__all__ = ["SUBJECTS", "MMLUDataLoader"]

SUBJECTS = (
    "abstract_algebra",
    "anatomy",
    "astronomy",
    "business_ethics",
    "clinical_knowledge",
    "college_biology",
    "college_chemistry",
    "college_computer_science",
    "college_mathematics",
    "college_medicine",
    "college_physics",
    "computer_security",
    "conceptual_physics",
    "econometrics",
    "electrical_engineering",
    "elementary_mathematics",
    "formal_logic",
    "global_facts",
    "high_school_biology",
    "high_school_chemistry",
    "high_school_computer_science",
    "high_school_european_history",
    "high_school_geography",
    "high_school_government_and_politics",
    "high_school_macroeconomics",
    "high_school_mathematics",
    "high_school_microeconomics",
    "high_school_physics",
    "high_school_psychology",
    "high_school_statistics",
    "high_school_us_history",
    "high_school_world_history",
    "human_aging",
    "human_sexuality",
    "international_law",
    "jurisprudence",
    "logical_fallacies",
    "machine_learning",
    "management",
    "marketing",
    "medical_genetics",
    "miscellaneous",
    "moral_disputes",
    "moral_scenarios",
    "nutrition",
    "philosophy",
    "prehistory",
    "professional_accounting",
    "professional_law",
    "professional_medicine",
    "professional_psychology",
    "public_relations",
    "security_studies",
    "sociology",
    "us_foreign_policy",
    "virology",
    "world_religions",
)
"""The subjects, as upstream spells them."""

_SPLITS = {"auxiliary_train": "", "dev": "dev", "validation": "val", "test": "test"}
_QUESTION, _ANSWER = ("question", "input"), ("answer", "target")  # what headers call them


class MMLUDataLoader:
    """The examples of one split of MMLU; see `penstock.catalog.tasks` for their keys.

    Args:
        subset: A subject, or "all".
        split: "auxiliary_train" (which has no subjects: ask for "all"), "dev", "validation"
            or "test".
        directory: Where the files are; see `penstock.catalog.tasks` for where else.
    """

    def __init__(
        self, subset: str = "all", split: str = "test", directory: PathLike | None = None
    ) -> None:
        self.subset = known("subject of MMLU", subset, (*SUBJECTS, "all"))
        self.split = known("split of MMLU", split, tuple(_SPLITS))
        if split == "auxiliary_train" and subset != "all":
            raise SourceError(
                f'auxiliary_train has no subjects, so none called {subset!r}. Ask for "all".'
            )
        self.directory = directory

    def load_data(self) -> list[dict[str, Any]]:
        """All examples, in the order of the files.

        Raises:
            SourceError: the files are not there, or a row is not as it should be.
        """
        wanted = f"MMLU {self.subset} {self.split}"
        files = find_files("mmlu", self._patterns(), self.directory, wanted)
        rows = [row for path in files for row in _unheaded(list(rows_of(path)))]
        if self.subset != "all":  # a file of all subjects says which each row is of
            rows = [row for row in rows if _subject(row) in (None, self.subset)]
            if not rows:
                raise SourceError(f"{files[0]} has no row of the subject {self.subset!r}.")
        return [_example(row) for row in rows]

    def _patterns(self) -> list[str]:
        name, split, short = self.subset, self.split, _SPLITS[self.split]
        if split == "auxiliary_train":
            tables = ["auxiliary_train/*.csv", "*/auxiliary_train/*.csv"]
        else:
            each = "*" if name == "all" else name
            tables = [f"{place}{each}_{short}.csv" for place in (f"{short}/", "", f"*/{short}/")]
        parquet = [f"{name}/{split}-*.parquet", f"{name}/{split}/*.parquet"]
        return [*tables, *parquet, f"all/{split}-*.parquet", f"all-{split}.parquet"]


def _unheaded(rows: list[Row]) -> list[Row]:
    """CSV rows as dicts of question, choices and answer; a first row of names is taken away."""
    if not rows or isinstance(rows[0].values, dict):
        return rows
    first = [cell.strip().lower() for cell in rows[0].values]
    headed = first[0] in _QUESTION and first[-1] in _ANSWER
    found = []
    for values, where in rows[1:] if headed else rows:
        if len(values) != len(first) or len(values) < 4:
            raise SourceError(f"{where} has {len(values)} cells, and the first has {len(first)}.")
        question, *choices, answer = values
        found.append(Row({"question": question, "choices": choices, "answer": answer}, where))
    return found


def _subject(row: Row) -> str | None:
    return row.values.get("subject") or None


def _example(row: Row) -> dict[str, Any]:
    values = row.values
    if set(values) == {"train"}:  # the Hub's auxiliary_train has its rows one level down
        values = values["train"]
    try:
        question, choices, told = values["question"], values["choices"], values["answer"]
    except KeyError as error:
        raise SourceError(f"{row.where} is not a question of MMLU: it has no {error}.") from None
    answer = str(told).strip().upper()
    if not answer.isdecimal() and (len(answer) != 1 or not "A" <= answer <= "J"):
        raise SourceError(f"{row.where} has the answer {told!r}; it is a letter, or a number.")
    right = int(answer) if answer.isdecimal() else ord(answer) - ord("A")
    return choice_example(question, choices, right, where=row.where)
