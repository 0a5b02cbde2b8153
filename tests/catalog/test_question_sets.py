"""Question sets: their layouts, their keys, and the directories that are searched."""

import csv
import json
from contextlib import nullcontext
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import catalog
from penstock.catalog import (
    ARCDataLoader,
    GSM8KDataLoader,
    MMLUDataLoader,
    build_stores,
    entries,
    fetch,
    find_entry,
)
from penstock.errors import FetchError, SourceError
from penstock.integrations.multiplex import create_multiplex_dataloader

KEYS = ["question", "choices", "answer", "messages"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A separate working directory and cache for every test."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)


def original(stem, texts, labels, right):
    choices = [{"text": t, "label": label} for t, label in zip(texts, labels, strict=True)]
    return {"id": "x", "question": {"stem": stem, "choices": choices}, "answerKey": right}


def hub(stem, texts, labels, right):
    return {
        "id": "x",
        "question": stem,
        "choices": {"text": texts, "label": list(labels)},
        "answerKey": right,
    }


ROWS = [
    ("Which é?", ["one", "two", "three", "four"], "ABCD", "C"),
    ("Numbered?", ["one", "two", "three", "four"], "1234", "2"),
    ("Three?", ["one", "two", "three"], "ABC", "A"),
    ("Five?", ["one", "two", "three", "four", "five"], "ABCDE", "E"),
]


@pytest.mark.parametrize(
    "name",
    [
        "ARC-Easy-Dev.jsonl",
        "ARC-Easy/ARC-Easy-Dev.jsonl",
        "ARC-V1-Feb2018-2/ARC-Easy/ARC-Easy-Dev.jsonl",
        "ARC-Easy/validation-00000-of-00001.parquet",
        "ARC-Easy/validation/0000.parquet",
        "ARC-Easy-validation.parquet",
    ],
)
def test_arc_is_read_from_every_layout(home, name):
    if name.endswith("jsonl"):
        write_lines(home / name, [original(*row) for row in ROWS])
    else:
        write_parquet(home / name, [hub(*row) for row in ROWS])

    for split in ("validation", "Dev", "dev"):
        found = ARCDataLoader("ARC-Easy", split, directory=home).load_data()
        assert [each["answer"] for each in found] == ["C", "B", "A", "E"]
        assert [len(each["choices"]) for each in found] == [4, 4, 3, 5]
        assert all(list(each) == KEYS for each in found)
    assert found[2] == {
        "question": "Three?",
        "choices": ["one", "two", "three"],
        "answer": "A",
        "messages": [
            {
                "role": "user",
                "content": "Three?\n\nA. one\nB. two\nC. three\n\n"
                "Answer with the letter of the right choice.",
            },
            {"role": "assistant", "content": "A"},
        ],
    }


@pytest.mark.parametrize("name", ["train.jsonl", "main/train-00000-of-00001.parquet"])
def test_gsm8k_is_read_from_every_layout(home, name):
    rows = [{"question": "6 x 7?", "answer": "6*7 = <<6*7=42>>42\n#### 1,042"}]
    (write_lines if name.endswith("jsonl") else write_parquet)(home / name, rows)

    (found,) = GSM8KDataLoader("train", directory=home).load_data()

    assert list(found) == KEYS
    assert (found["choices"], found["answer"]) == ([], "1042")
    assert found["messages"][1]["content"] == rows[0]["answer"]


MMLU = [
    ["What, exactly?", "a", 'b "quoted"', "c\nd", "e", "B"],
    ["And this?", "0", "1", "2", "3", "D"],
]


@pytest.mark.parametrize("place", ["test/", "", "data/test/"])
@pytest.mark.parametrize("headed", [False, True])
def test_mmlu_is_read_from_csv_with_and_without_a_header(home, place, headed):
    rows = MMLU
    if headed:
        rows = [["question", "choice0", "choice1", "choice2", "choice3", "answer"]]
        rows += [[*row[:-1], "ABCD".index(row[-1])] for row in MMLU]
    write_csv(home / f"{place}anatomy_test.csv", rows)

    for subset in ("anatomy", "all"):
        loader = MMLUDataLoader(subset, "test", directory=home)
        told = "has 1 of the 57 subjects of MMLU, 2 questions .*abstract_algebra, .* 53 more"
        with pytest.warns(match=told) if subset == "all" else nullcontext():
            found = loader.load_data()
        assert [each["answer"] for each in found] == ["B", "D"]
        assert found[0]["choices"] == ["a", 'b "quoted"', "c\nd", "e"]
        assert all(list(each) == KEYS for each in found)


@pytest.mark.parametrize(
    "name", ["all/test-00000-of-00001.parquet", "all-test.parquet", "anatomy/test-0.parquet"]
)
def test_mmlu_is_read_from_parquet_by_subject(home, name):
    rows = [
        {"question": q, "subject": subject, "choices": list("wxyz"), "answer": answer}
        for q, subject, answer in (("one", "anatomy", 2), ("two", "virology", 0))
    ]
    write_parquet(home / name, rows if name.startswith("all") else rows[:1])

    (found,) = MMLUDataLoader("anatomy", "test", directory=home).load_data()

    assert (found["question"], found["answer"]) == ("one", "C")
    if name.startswith("all"):
        assert len(MMLUDataLoader("all", "test", directory=home).load_data()) == 2
        with pytest.raises(SourceError, match="has no question of the subject 'marketing'"):
            MMLUDataLoader("marketing", "test", directory=home).load_data()


def test_mmlu_has_auxiliary_questions_without_subjects(home):
    write_csv(home / "auxiliary_train" / "race.csv", MMLU)

    assert len(MMLUDataLoader("all", "auxiliary_train", directory=home).load_data()) == 2
    with pytest.raises(SourceError, match="auxiliary_train is not divided into subjects"):
        MMLUDataLoader("anatomy", "auxiliary_train")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ARCDataLoader("ARC-Hard"),
            "'ARC-Hard' is not a subset of ARC; choose from ARC-Easy, ARC-Challenge",
        ),
        (
            lambda: ARCDataLoader(split="valid"),
            "'valid' is not a split of ARC; choose from train, validation, test",
        ),
        (lambda: GSM8KDataLoader("dev"), "'dev' is not a split of GSM8K; choose from train, test"),
        (
            lambda: MMLUDataLoader("algebra"),
            "'algebra' is not a subject of MMLU; choose from abstract_algebra, anatomy",
        ),
        (
            lambda: MMLUDataLoader(split="train"),
            "choose from auxiliary_train, dev, validation, test",
        ),
    ],
)
def test_an_unknown_name_lists_the_known_ones(make, message):
    with pytest.raises(SourceError, match=message):
        make()


@pytest.mark.parametrize(
    ("loader", "name"),
    [(ARCDataLoader, "arc"), (GSM8KDataLoader, "gsm8k"), (MMLUDataLoader, "mmlu")],
)
def test_missing_files_are_reported_with_the_command_that_fetches_them(loader, name, home):
    with pytest.raises(SourceError) as caught:
        loader().load_data()

    assert f"is not in data/{name} or {home / 'cache' / name}" in str(caught.value)
    assert f"penstock fetch {name}" in str(caught.value)
    with pytest.raises(SourceError, match="is not in nowhere"):
        loader(directory="nowhere").load_data()


def test_the_directory_comes_before_the_data_folder_and_that_before_the_cache(home):
    places = {
        "there": home / "there",
        "work": home / "work/data/gsm8k",
        "cache": home / "cache/gsm8k",
    }
    for name, place in places.items():
        write_lines(place / "test.jsonl", [{"question": name, "answer": "#### 1"}])

    def found(**options):
        return GSM8KDataLoader("test", **options).load_data()[0]["question"]

    assert (found(directory=home / "there"), found()) == ("there", "work")
    (places["work"] / "test.jsonl").unlink()
    assert found() == "cache"


BROKEN = [
    (ARCDataLoader, "ARC-Easy-Train.jsonl", b'{"id": 1}\n', "line 1 is not a question of ARC"),
    (ARCDataLoader, "ARC-Easy-Train.jsonl", b"\n{no\n", "line 2 is not JSON"),
    (
        ARCDataLoader,
        "ARC-Easy-Train.jsonl",
        json.dumps(original("q", ["x"], "A", "B")).encode(),
        "has the choices A, but marks 'B' as right",
    ),
    (ARCDataLoader, "ARC-Easy-train.parquet", b"PAR1", "cannot be read as Parquet"),
    (GSM8KDataLoader, "train.jsonl", b'{"question": "q"}\n', "it has no 'answer'"),
    (GSM8KDataLoader, "train.jsonl", b'{"question": "q", "answer": "7"}\n', "without ####"),
    (
        MMLUDataLoader,
        "anatomy_test.csv",
        b"q,a,b,c,d,E\n",
        "4 choices, but marks number 5 as right",
    ),
    (MMLUDataLoader, "anatomy_test.csv", b"q,a,b,c,d,?\n", "has the answer '\\?'"),
    (
        MMLUDataLoader,
        "anatomy_test.csv",
        b"q,a,b,c,d,A\nq,a,b\n",
        r"line 2 has 3 cells\. A row needs .* in as many cells as the first row \(6\)",
    ),
    (
        MMLUDataLoader,
        "anatomy_test.csv",
        b"q,a,A\nq,a,A\n",
        r"line 1 has 3 cells\. A row needs a question, two or more choices and an answer",
    ),
    (MMLUDataLoader, "anatomy_test.csv", b'q,"a\n', "is not CSV"),
    (MMLUDataLoader, "all-test.parquet", None, "it has no 'choices'"),
    (
        ARCDataLoader,
        "ARC-Easy-Train.jsonl",
        b"[1]\n",
        "line 1 holds a list, but a row must be a JSON object",
    ),
    (ARCDataLoader, "ARC-Easy-Train.jsonl", b"\x1f\x8b\n", "is not UTF-8 .*decompress it"),
    (MMLUDataLoader, "anatomy_test.csv", b"q,a,b,c,\xff,A\n", "is not UTF-8"),
    (GSM8KDataLoader, "train.jsonl", b'{"question": "q", "answer": 7}\n', "without ####"),
]


@pytest.mark.parametrize(("loader", "name", "contents", "message"), BROKEN)
def test_a_malformed_row_is_reported_with_its_location(loader, name, contents, message, home):
    if contents is None:
        write_parquet(home / name, [{"question": "q", "answer": 1}])
    else:
        (home / name).write_bytes(contents)

    with pytest.raises(SourceError, match=message) as caught:
        loader(directory=home).load_data()
    assert name in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_a_file(home):
    mark = "\ufeff".encode()
    table = b"question,choice0,choice1,choice2,choice3,answer\nq,w,x,y,z,2\n"
    (home / "anatomy_test.csv").write_bytes(mark + table)
    (home / "train.jsonl").write_bytes(mark + b'{"question": "q", "answer": "#### 7"}\n')

    assert MMLUDataLoader("anatomy", "test", home).load_data()[0]["answer"] == "C"
    assert GSM8KDataLoader("train", home).load_data()[0]["answer"] == "7"


@pytest.fixture
def arc(data, home):
    """The shared files of ARC under AI2's names."""
    for subset in ("Easy", "Challenge"):
        for ours, theirs in (("Train", "train"), ("Dev", "dev"), ("Test", "test")):
            file = data / "arc" / f"genmc_arc_{subset.lower()}_{theirs}.jsonl"
            if file.exists():
                (home / f"ARC-{subset}-{ours}.jsonl").symlink_to(file)
    return home


def test_the_real_sets_have_the_sizes_that_are_known(arc, data):
    def size(loader):
        found = loader.load_data()
        assert all(list(each) == KEYS for each in found)
        assert all(len(each["messages"]) == 2 for each in found)
        return len(found)

    assert size(ARCDataLoader("ARC-Easy", "train", arc)) == 2_251
    assert size(ARCDataLoader("ARC-Easy", "validation", arc)) == 570
    assert size(ARCDataLoader("ARC-Easy", "test", arc)) == 2_376
    assert size(ARCDataLoader("ARC-Challenge", "train", arc)) == 1_119
    assert size(ARCDataLoader("ARC-Challenge", "validation", data / "arc")) == 294
    assert size(GSM8KDataLoader("train", data / "gsm8k")) == 7_473
    assert size(GSM8KDataLoader("test", data / "gsm8k")) == 1_319
    assert size(MMLUDataLoader("abstract_algebra", "test", data / "mmlu")) == 100
    with pytest.warns(match="has 10 of the 57 subjects"):
        assert size(MMLUDataLoader("all", "dev", data / "mmlu")) == 50
    chemistry = data / "mmlu" / "hendrycks_layout"
    assert size(MMLUDataLoader("high_school_chemistry", "test", chemistry)) == 203


def test_the_real_sets_mix_in_one_batch(arc, data):
    sets = [
        ("arc", ARCDataLoader("ARC-Easy", "train", arc).load_data()),
        ("gsm8k", GSM8KDataLoader("train", data / "gsm8k").load_data()),
        ("mmlu", MMLUDataLoader("abstract_algebra", "test", data / "mmlu").load_data()),
    ]
    loader = create_multiplex_dataloader(sets, batch_size=32, sampling_strategy="uniform")
    batch = next(iter(loader))

    assert list(batch) == [*KEYS, "dataset_name", "dataset_idx"]
    assert set(batch["dataset_name"]) == {"arc", "gsm8k", "mmlu"}
    assert sum(len(batch["messages"]) for batch in loader) == 9_824


def test_gsm8k_is_fetched_from_a_copy_and_found(data, home):
    fetched = fetch("gsm8k", source=data / "gsm8k")

    assert set(fetched.files) == {"train", "test"}
    assert len(GSM8KDataLoader("test").load_data()) == 1_319
    with pytest.raises(SourceError, match=r"Read it with penstock\.catalog\.GSM8KDataLoader"):
        build_stores(fetched)


def of_any_contents(entry):
    """The same files, with no size or checksum known of any of them."""
    free = {"num_bytes": None, "sha256": None}
    remotes = [
        replace(each, files=tuple(replace(file, **free) for file in each.files), **free)
        for each in entry.remotes
    ]
    return replace(entry, remotes=tuple(remotes))


@pytest.mark.parametrize("name", ["arc", "mmlu"])
def test_parquet_sets_are_fetched_from_a_mirror_and_found(name, server, home, monkeypatch):
    entry = of_any_contents(find_entry(name))
    monkeypatch.setattr(entries, "ENTRIES", (entry,))
    row = hub(*ROWS[0]) if name == "arc" else None
    for remote in entry.remotes:
        subject = {"question": "q", "subject": "anatomy", "choices": list("wxyz"), "answer": 1}
        path = home / "made.parquet"
        write_parquet(path, [row or subject])
        server.files[f"/mirror/{remote.name}"] = path.read_bytes()

    fetched = fetch(name, source=f"http://{server.address}/mirror")

    assert len(fetched.files) == len(entry.remotes)
    if name == "arc":
        assert len(ARCDataLoader("ARC-Challenge", "test").load_data()) == 1
    else:
        assert len(MMLUDataLoader("anatomy", "validation").load_data()) == 1
        assert len(MMLUDataLoader("anatomy", "val").load_data()) == 1
        assert len(MMLUDataLoader("all", "auxiliary_train").load_data()) == 1
    again = fetch(name, source=f"http://{server.address}/mirror")
    assert again.received_bytes == 0


@pytest.mark.parametrize(("name", "first"), [("arc", 0), ("mmlu", 1)])
def test_a_parquet_file_of_other_bytes_is_refused(name, first, server, home):
    remote = find_entry(name).remotes[first]
    write_parquet(home / "made.parquet", [hub(*ROWS[0])])
    for each in find_entry(name).remotes:
        server.files[f"/mirror/{each.name}"] = (home / "made.parquet").read_bytes()

    with pytest.raises(FetchError, match=remote.sha256[:8]):
        fetch(name, source=f"http://{server.address}/mirror")
    assert not (home / "work" / "data" / name / remote.files[0].name).exists()


@pytest.mark.parametrize("name", ["arc", "mmlu"])
def test_parquet_sets_are_fetched_from_the_hub_and_found(name, server, home, monkeypatch):
    """Size and SHA-256 are not recorded here, so those of the Hub are used."""
    entry = of_any_contents(find_entry(name))
    monkeypatch.setattr(entries, "ENTRIES", (entry,))
    monkeypatch.setenv("HF_ENDPOINT", f"http://{server.address}")
    question = {"question": "q", "subject": "anatomy", "choices": list("wxyz"), "answer": 1}
    write_parquet(home / "made.parquet", [hub(*ROWS[0]) if name == "arc" else question])
    for remote in entry.remotes:
        path = remote.urls[0].removeprefix("https://huggingface.co")
        server.files[path] = (home / "made.parquet").read_bytes()

    fetched = fetch(name)

    assert len(fetched.files) == len(entry.remotes) == len(server.heads) == len(server.requests)
    assert fetched.received_bytes > 0
    loader = ARCDataLoader("ARC-Easy", "test") if name == "arc" else MMLUDataLoader("anatomy")
    assert len(loader.load_data()) == 1
    assert fetch(name).received_bytes == 0
    assert len(server.heads) == len(entry.remotes)


def test_importing_the_readers_loads_nothing_heavy(python):
    code = "import sys, penstock.catalog; print([n for n in sys.argv[1:] if n in sys.modules])"
    code += "; from penstock.catalog import ARCDataLoader, GSM8KDataLoader, MMLUDataLoader"
    code += "; print([n for n in sys.argv[1:] if n in sys.modules])"

    assert python(code, "torch", "pyarrow", "numpy", "gigatoken").stdout == "[]\n[]\n"


NAMES = [
    "ENTRIES",
    "TRAIN_SPLIT_RATIO",
    "ARCDataLoader",
    "DownloadLimits",
    "Entry",
    "FetchProgress",
    "Fetched",
    "GSM8KDataLoader",
    "MMLUDataLoader",
    "build_stores",
    "fetch",
    "find_entry",
]


@pytest.mark.parametrize("first", NAMES)
def test_public_names_are_pinned_and_the_same_in_any_order(python, first):
    """`fetch` is also the name of a module: the package must always give the function."""
    code = """
import sys
import penstock.catalog as catalog
getattr(catalog, sys.argv[1])
assert catalog.__all__ == sys.argv[2:], catalog.__all__
assert set(catalog.__all__) <= set(dir(catalog))
assert callable(catalog.fetch)
assert all(getattr(catalog, name) for name in catalog.__all__)
"""
    python(code, first, *sorted(NAMES))


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'penstock\.catalog' has no attribute 'nope'"):
        catalog.nope  # noqa: B018
