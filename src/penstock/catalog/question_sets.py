"""Readers of question sets: ARC, GSM8K and MMLU.

    ARC     AI2's files (`ARC-Easy/ARC-Easy-Train.jsonl`; validation is called Dev), and the
            Parquet files of the Hugging Face Hub (`ARC-Easy/train-00000-of-00001.parquet`)
    GSM8K   OpenAI's files (`train.jsonl`, `test.jsonl`), and the Parquet files of the Hub
            (`main/train-00000-of-00001.parquet`)
    MMLU    the authors' CSV files (`test/anatomy_test.csv`: no header, the answer is a letter),
            CSV files with a header (`question,choice0,…,answer`, the answer is a number from 0),
            and the Parquet files of the Hub, per subject or all in one file

All three return examples with the keys that `penstock.catalog.tasks` describes.
"""

from typing import Any

from penstock.catalog.tasks import (
    PathLike,
    TaskRow,
    check_name,
    choice_example,
    example,
    find_files,
    read_rows,
)
from penstock.errors import SourceError

_ARC_SUBSETS = ("ARC-Easy", "ARC-Challenge")
_ARC_SPLITS = {"train": "Train", "validation": "Dev", "test": "Test"}  # our names: AI2's names
_SOLUTION_MARK = "####"  # precedes the final number of a solution

MMLU_SUBJECTS = tuple(
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
"""The subjects of MMLU, under their upstream names."""

# Our names, and the names in the authors' CSV files.
_MMLU_SPLITS = {"auxiliary_train": "", "dev": "dev", "validation": "val", "test": "test"}
# Column names that CSV headers use.
_MMLU_QUESTION, _MMLU_ANSWER = ("question", "input"), ("answer", "target")


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
        self.subset = check_name("subset of ARC", subset, _ARC_SUBSETS)
        split = "validation" if split in ("Dev", "dev") else split
        self.split = check_name("split of ARC", split, tuple(_ARC_SPLITS))
        self.directory = directory

    def load_data(self) -> list[dict[str, Any]]:
        """Return all examples, in the order of the file.

        Raises:
            SourceError: the files are missing, or a row is malformed.
        """
        name, split = self.subset, self.split
        original = f"{name}-{_ARC_SPLITS[split]}.jsonl"
        patterns = [original, f"{name}/{original}", f"*/{name}/{original}"]
        # Three names of the same file: from `penstock fetch`, in the Hub's repository, and in the
        # Hub's own conversion to Parquet.
        patterns += [f"{name}-{split}.parquet", f"{name}/{split}-*.parquet"]
        patterns += [f"{name}/{split}/*.parquet"]
        files = find_files("arc", patterns, self.directory, f"{name} {split}")
        return [_arc_example(row) for path in files for row in read_rows(path)]


def _arc_example(row: TaskRow) -> dict[str, Any]:
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
        # Three names of the same file: in the Hub's repository, the same without its folder, and in
        # the Hub's own conversion to Parquet.
        patterns += [f"main/{split}-*.parquet", f"{split}-*.parquet", f"main/{split}/*.parquet"]
        files = find_files("gsm8k", patterns, self.directory, f"GSM8K {split}")
        return [_gsm8k_example(row) for path in files for row in read_rows(path)]


def _gsm8k_example(row: TaskRow) -> dict[str, Any]:
    try:
        question, solution = row.values["question"], row.values["answer"]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{row.where} is not a problem of GSM8K: it has no {error}.") from None
    _, mark, number = (
        solution.rpartition(_SOLUTION_MARK) if isinstance(solution, str) else ("", "", "")
    )
    if not mark:
        raise SourceError(
            f"{row.where} has a solution without {_SOLUTION_MARK}, which must precede its final "
            "number."
        )
    return example(question, number.strip().replace(",", ""), question, solution)


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
        self.subset = check_name("subject of MMLU", subset, (*MMLU_SUBJECTS, "all"))
        self.split = check_name("split of MMLU", split, tuple(_MMLU_SPLITS))
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
        return [_mmlu_example(row) for row in rows]

    def _patterns(self) -> list[str]:
        name, split, short = self.subset, self.split, _MMLU_SPLITS[self.split]
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
    # The authors' files have no header. A header is recognised by its first and its last cell,
    # because the text of a question could be just "question".
    first = [cell.strip().lower() for cell in rows[0].values]
    has_header = first[0] in _MMLU_QUESTION and first[-1] in _MMLU_ANSWER
    found = []
    for values, where in rows[1:] if has_header else rows:
        if len(values) != len(first) or len(values) < 4:
            raise SourceError(
                f"{where} has {len(values)} cells, but the first row has {len(first)}."
            )
        question, *choices, answer = values
        found.append(TaskRow({"question": question, "choices": choices, "answer": answer}, where))
    return found


def _mmlu_example(row: TaskRow) -> dict[str, Any]:
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
