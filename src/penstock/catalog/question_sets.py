"""Reads question sets from local files: ARC, GSM8K and MMLU.

    ARC     AI2's files (`ARC-Easy/ARC-Easy-Train.jsonl`; validation is called Dev), and the
            Parquet files of the Hugging Face Hub (`ARC-Easy/train-00000-of-00001.parquet`)
    GSM8K   OpenAI's files (`train.jsonl`, `test.jsonl`), and the Parquet files of the Hub
            (`main/train-00000-of-00001.parquet`)
    MMLU    the authors' CSV files (`test/anatomy_test.csv`: no header, the answer is a letter),
            CSV files with a header (`question,choice0,…,answer`, the answer is a number from 0),
            and the Parquet files of the Hub, per subject or all in one file

All three return examples with the same four keys, so examples of different sets can be mixed in
one batch:

    {"question": "Which gas do plants take in?",
     "choices":  ["oxygen", "carbon dioxide", "neon"],     # [] if there are no choices
     "answer":   "B",                                      # a letter, or the answer itself
     "messages": [{"role": "user", "content": …}, {"role": "assistant", "content": "B"}]}

Files are looked for in `directory` if it is given. Otherwise they are looked for in `data/NAME`,
where `penstock fetch NAME` puts them, and then in `~/.cache/penstock/NAME` (or
`$PENSTOCK_CACHE/NAME`). Nothing is downloaded.
"""

import difflib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.catalog.question_rows import Row, read_rows
from penstock.errors import MissingInputError, SourceError
from penstock.paths import expand_user

_LETTERS = "ABCDEFGHIJ"
_ARC_SUBSETS = ("ARC-Easy", "ARC-Challenge")
_ARC_SPLITS = {"train": "Train", "validation": "Dev", "test": "Test"}  # our names: AI2's names
_SOLUTION_MARK = "####"  # precedes the final number of a solution

_MMLU_SUBJECTS = tuple(
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
# Our names, and the names in the authors' CSV files.
_MMLU_SPLITS = {"auxiliary_train": "", "dev": "dev", "validation": "val", "test": "test"}

PathLike = str | os.PathLike[str]
Example = dict[str, Any]


class _QuestionSet:
    """One split of a question set; a subclass knows its files and its rows."""

    entry: str
    row_is: str
    subset = ""
    split: str
    directory: PathLike | None

    def __repr__(self) -> str:
        subset = f"{self.subset!r}, " if self.subset else ""
        return f"{type(self).__name__}({subset}split={self.split!r})"

    def load_data(self) -> list[Example]:
        """Return all examples, in the order of the files.

        Raises:
            SourceError: the files are missing, or a row is malformed.
        """
        found, skipped = [], False
        files = self._find_files()
        for path in files:
            for where, row in read_rows(path):
                # The Hub's file of all subjects has a subject column; files of one subject do not.
                if self.subset not in ("all", row.get("subject") or self.subset):
                    skipped = True
                    continue
                try:
                    found.append(self._example(row))
                except (KeyError, TypeError) as error:
                    raise SourceError(f"{where} is not {self.row_is}: it has no {error}.") from None
                except ValueError as error:
                    raise SourceError(f"{where} has {error}") from None
        if skipped and not found:
            raise SourceError(f"{files[0]} has no question of the subject {self.subset!r}.")
        return found

    def _find_files(self) -> list[Path]:
        """Return the files for the first directory and the first pattern with a match."""
        # Imported here: it imports NumPy, and a script that only names a question set needs none.
        from penstock.disk import cache_directory

        directories = [Path("data") / self.entry, cache_directory() / self.entry]
        if self.directory is not None:
            directories = [expand_user(self.directory)]
        patterns = self._patterns()
        for each in directories:
            # Patterns are ordered: upstream's own files first, then copies in other formats. Only
            # one pattern is used, as two would read the same questions twice.
            for pattern in patterns:
                if found := sorted(path for path in each.glob(pattern) if path.is_file()):
                    return found
        wanted = " ".join(filter(None, (self.entry, self.subset, self.split)))
        searched = " or ".join(map(str, directories))
        raise MissingInputError(
            f"{wanted} is not in {searched} (working directory: {Path.cwd()}); looked for "
            f"{', '.join(dict.fromkeys(patterns))}. Fetch it with: penstock fetch {self.entry}; "
            "or pass its directory as directory=."
        )

    def _patterns(self) -> list[str]:
        raise NotImplementedError

    def _example(self, row: Row) -> Example:
        """Return the example of a row.

        Raises:
            KeyError: the row lacks a column.
            ValueError: a value is wrong; the text of the error says what the row has.
        """
        raise NotImplementedError


class ARCDataLoader(_QuestionSet):
    """Reads the examples of one split of ARC, with the keys question, choices, answer, messages.

    Args:
        subset: "ARC-Easy" or "ARC-Challenge".
        split: "train", "validation" or "test". "val" and "Dev", AI2's name, mean validation.
        directory: Where the files are; by default `data/arc`, then the cache directory.
    """

    entry, row_is = "arc", "a question of ARC"

    def __init__(
        self, subset: str = "ARC-Easy", split: str = "train", directory: PathLike | None = None
    ) -> None:
        self.subset = _check_name("subset of ARC", subset, _ARC_SUBSETS)
        split = "validation" if split in ("Dev", "dev", "val") else split
        self.split = _check_name("split of ARC", split, _ARC_SPLITS)
        self.directory = directory

    def _patterns(self) -> list[str]:
        name, split = self.subset, self.split
        original = f"{name}-{_ARC_SPLITS[split]}.jsonl"
        # Three names of the same Parquet file: from `penstock fetch`, in the Hub's repository, and
        # in the Hub's own conversion to Parquet.
        parquet = [f"{name}-{split}.parquet", f"{name}/{split}-*.parquet"]
        parquet += [f"{name}/{split}/*.parquet"]
        return [original, f"{name}/{original}", f"*/{name}/{original}", *parquet]

    def _example(self, row: Row) -> Example:
        question, right = row["question"], row["answerKey"]
        # AI2 stores the choices inside the question, the Hub beside it.
        if isinstance(question, dict):
            choices = [each["text"] for each in question["choices"]]
            labels = [each["label"] for each in question["choices"]]
            question = question["stem"]
        else:
            choices, labels = row["choices"]["text"], row["choices"]["label"]
        # Labels are A to E in most rows, 1 to 4 in a few; the answer uses the row's own labels.
        if right not in labels:
            listed = ", ".join(map(str, labels))
            raise ValueError(f"the choices {listed}, but marks {right!r} as right.")
        return _choice_example(question, choices, labels.index(right))


class GSM8KDataLoader(_QuestionSet):
    """Reads the examples of one split of GSM8K, with the keys question, choices, answer, messages.

    `answer` is the final number of the solution, without commas. The assistant's message is the
    whole solution as published, including calculations in `<<…>>` and `####`. There are no
    choices.

    Args:
        split: "train" or "test".
        directory: Where the files are; by default `data/gsm8k`, then the cache directory.
    """

    entry, row_is = "gsm8k", "a problem of GSM8K"

    def __init__(self, split: str = "train", directory: PathLike | None = None) -> None:
        self.split = _check_name("split of GSM8K", split, ("train", "test"))
        self.directory = directory

    def _patterns(self) -> list[str]:
        split = self.split
        # Three names of the same Parquet file: in the Hub's repository, the same without its
        # folder, and in the Hub's own conversion to Parquet.
        parquet = [f"main/{split}-*.parquet", f"{split}-*.parquet", f"main/{split}/*.parquet"]
        return [f"{split}.jsonl", f"grade_school_math/data/{split}.jsonl", *parquet]

    def _example(self, row: Row) -> Example:
        question, solution = row["question"], row["answer"]
        _, mark, number = str(solution).rpartition(_SOLUTION_MARK)
        if not mark:
            raise ValueError(f"a solution without {_SOLUTION_MARK}, which precedes the number.")
        return _as_example(question, number.strip().replace(",", ""), question, solution)


class MMLUDataLoader(_QuestionSet):
    """Reads the examples of one split of MMLU, with the keys question, choices, answer, messages.

    Args:
        subset: A subject, or "all": the subjects that the directory has, with a warning if some
            of the 57 are missing.
        split: "auxiliary_train" (only with subset="all"), "dev", "validation" or "test". "val"
            means validation.
        directory: Where the files are; by default `data/mmlu`, then the cache directory.
    """

    entry, row_is = "mmlu", "a question of MMLU"

    def __init__(
        self, subset: str = "all", split: str = "test", directory: PathLike | None = None
    ) -> None:
        self.subset = _check_name("subject of MMLU", subset, (*_MMLU_SUBJECTS, "all"))
        split = "validation" if split == "val" else split
        self.split = _check_name("split of MMLU", split, _MMLU_SPLITS)
        if split == "auxiliary_train" and subset != "all":
            raise SourceError(
                f'auxiliary_train is not divided into subjects; got {subset!r}. Use subset="all".'
            )
        self.directory = directory

    def load_data(self) -> list[Example]:
        """Return all examples, in the order of the files.

        Raises:
            SourceError: the files are missing, or a row is malformed.
        """
        found, short = super().load_data(), _MMLU_SPLITS[self.split]
        files = self._find_files() if self.subset == "all" and short else []
        # A CSV file has one subject; the Parquet file of "all" has all of them.
        present = {path.stem.removesuffix(f"_{short}") for path in files if path.suffix == ".csv"}
        missing = [subject for subject in _MMLU_SUBJECTS if subject not in present]
        if present and missing:
            warnings.warn(
                f"{files[0].parent} has {len(_MMLU_SUBJECTS) - len(missing)} of the "
                f"{len(_MMLU_SUBJECTS)} subjects of MMLU, {len(found):,} questions of the split "
                f"{self.split}. Missing are {', '.join(missing[:3])}"
                + (f" and {len(missing) - 3} more." if len(missing) > 3 else "."),
                stacklevel=2,
            )
        return found

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

    def _example(self, row: Row) -> Example:
        # The Hub's auxiliary_train has each question inside a struct called "train".
        values = row["train"] if set(row) == {"train"} else row
        question, choices, given = values["question"], values["choices"], values["answer"]
        answer = str(given).strip().upper()
        if not answer.isdecimal() and (len(answer) != 1 or answer not in _LETTERS):
            raise ValueError(f"the answer {given!r}; an answer must be a letter or a number.")
        # Numbers count from 0, so "1" and "B" are the same choice.
        right = int(answer) if answer.isdecimal() else _LETTERS.index(answer)
        return _choice_example(question, choices, right)


def _check_name(what: str, name: str, names: Sequence[str] | dict[str, str]) -> str:
    if name not in names:
        lower = {each.lower(): each for each in names}
        near = difflib.get_close_matches(str(name).lower(), lower, 1)
        guess = f" Did you mean {lower[near[0]]}?" if near else ""
        raise SourceError(f"{name!r} is not a {what}; choose from {', '.join(names)}.{guess}")
    return name


def _choice_example(question: str, choices: Sequence[str], right: int) -> Example:
    """Return an example whose choices are lettered from A, whatever their labels upstream."""
    if not 0 <= right < len(choices) <= len(_LETTERS):
        raise ValueError(f"{len(choices)} choices, but marks number {right + 1} as right.")
    # Upstream uses A to E, 1 to 4 or 0 to 3; one scheme lets a model learn a single format.
    listed = "\n".join(f"{_LETTERS[n]}. {choice}" for n, choice in enumerate(choices))
    asked = f"{question}\n\n{listed}\n\nAnswer with the letter of the right choice."
    return _as_example(question, _LETTERS[right], asked, _LETTERS[right], choices)


def _as_example(
    question: str, answer: str, asked: str, replied: str, choices: Sequence[str] = ()
) -> Example:
    """Return an example: `asked` is the user's message, `replied` the assistant's."""
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": replied}]
    return {"question": question, "choices": list(choices), "answer": answer, "messages": messages}
