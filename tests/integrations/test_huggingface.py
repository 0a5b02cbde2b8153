"""Hugging Face's datasets, collators, Trainer and accelerate over our rows."""

import json
import os
import runpy
import socket
import subprocess
from pathlib import Path

import pytest
import torch
import zygote

pytest.importorskip("datasets", reason="needs penstock[hf]")
pytest.importorskip("transformers", reason="needs penstock[hf]")

import datasets
import transformers

from penstock import Documents, Packs, Plan, Texts, Windows, build
from penstock.errors import PenstockError, PlanError, ResumeError, SourceError
from penstock.integrations.huggingface import (
    RowItems,
    RowsTrainer,
    StepLoader,
    build_dataset,
    export_texts,
    hf_tokenizer,
)
from penstock.integrations.stores import StoreSettings, store_of
from penstock.loader.fingerprints import RowReader, read_fingerprints
from penstock.tokenize.definition import find_definition
from penstock.tokenize.tokenizer import load_tokenizer
from penstock.transforms import TokenDropout, Transformed

TEXTS = [f"text {number} " + "goes on " * (number % 5) for number in range(40)]
SCRIPT = Path(__file__).parent / "trainer_script.py"


@pytest.fixture(scope="module")
def theirs():
    """GPT-2's tokenizer as `transformers` has it, from the same vocabulary."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(find_definition("gpt2").text)
    token = "<|endoftext|>"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=token,
        bos_token=token,
        pad_token=token,
        model_input_names=["input_ids", "attention_mask"],  # as its GPT2TokenizerFast
    )


@pytest.fixture
def store(tmp_path):
    return build(Texts(TEXTS), tmp_path / "store", eos=False)


@pytest.fixture
def windows(tmp_path):
    store = build(Texts(TEXTS), tmp_path / "windows", tokenizer="bytes")
    return Windows(store, 17, stride=16)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_is_built_as_its_texts_are(tmp_path, sums, streaming):
    dataset = datasets.Dataset.from_dict({"text": [*TEXTS, ""]})
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    found = build_dataset(dataset, tmp_path / "found", tokenizer="bytes")
    expected = build(Texts(TEXTS), tmp_path / "expected", tokenizer="bytes")

    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    again = build_dataset(dataset, tmp_path / "found", tokenizer="bytes")
    assert again.digest == found.digest


def test_a_selection_of_rows_keeps_its_order(tmp_path):
    dataset = datasets.Dataset.from_dict({"content": TEXTS}).select([7, 3, 5])
    found = build_dataset(dataset, tmp_path / "store", column="content", tokenizer="bytes")

    assert [found.decode(number) for number in range(3)] == [TEXTS[7], TEXTS[3], TEXTS[5]]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_that_is_not_there_is_named(tmp_path, streaming):
    dataset = datasets.Dataset.from_dict({"body": TEXTS})
    dataset = dataset.to_iterable_dataset() if streaming else dataset

    with pytest.raises(SourceError, match="no column 'text'; it has 'body'"):
        build_dataset(dataset, tmp_path / "store")


def test_a_row_that_is_no_text_is_named(tmp_path):
    with pytest.raises(SourceError, match="Row 0 has 7 in column 'n', which is not text"):
        export_texts(datasets.Dataset.from_dict({"n": [7, 8]}), tmp_path, "n")


def test_what_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r'dataset\["train"\]'):
        build_dataset({"train": TEXTS}, tmp_path / "store")


def test_the_column_may_be_called_field_as_in_build(tmp_path):
    dataset = datasets.Dataset.from_dict({"text": ["no"] * 3, "question": TEXTS[:3]})
    found = [
        build_dataset(dataset, tmp_path / name, tokenizer="bytes", **{name: "question"})
        for name in ("field", "column")
    ]

    assert found[0].digest == found[1].digest
    assert found[0].decode(0).startswith(TEXTS[0])
    with pytest.raises(PlanError, match="field='text' and column='question' mean the same"):
        build_dataset(dataset, tmp_path / "both", field="text", column="question")


def test_conversations_and_datasets_in_the_wrong_place_say_what_to_call(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats = datasets.Dataset.from_dict({"messages": [turns]})

    for options in ({}, {"column": "messages"}, {"chat": "chatml"}):
        with pytest.raises(PenstockError, match=r'to_json\("chats.jsonl"\), .* penstock.build'):
            build_dataset(chats, tmp_path / "store", **options)
    for inputs in (chats, [chats]):
        with pytest.raises(
            SourceError,
            match=r"is not a path.* dataset to penstock.integrations.huggingface.build_dataset",
        ):
            build(inputs, tmp_path / "other")


def test_a_data_module_takes_datasets(cache):
    settings = StoreSettings(tokenizer=load_tokenizer("bytes"))
    dataset = datasets.Dataset.from_dict({"text": TEXTS})
    one, other = store_of(dataset, settings), store_of(dataset, settings)

    assert one.path == other.path
    assert len(one) == 40


def test_our_tokenizer_gives_what_theirs_does(theirs):
    ours = hf_tokenizer("gpt2")
    text = "Hello <|endoftext|> naïve world, it's 3.14"

    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert (ours.pad_token_id, ours.eos_token_id) == (theirs.pad_token_id, theirs.eos_token_id)
    assert ours.convert_tokens_to_ids("<|endoftext|>") == 50256
    assert ours.convert_ids_to_tokens([15496]) == theirs.convert_ids_to_tokens([15496])
    expected = theirs(TEXTS[:3], padding=True, truncation=True, max_length=7, return_tensors="pt")
    found = ours(TEXTS[:3], padding=True, truncation=True, max_length=7, return_tensors="pt")
    assert list(found) == list(expected) == ["input_ids", "attention_mask"]
    assert all(torch.equal(found[name], expected[name]) for name in found)
    kept = theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.decode(ours.encode(text), skip_special_tokens=True) == kept


def test_batches_are_those_of_their_collator(store, theirs):
    loader = StepLoader(Documents(store, 12, pad_id=theirs.pad_token_id), 8, seed=3)
    collate = transformers.DataCollatorForLanguageModeling(theirs, mlm=False)
    texts = {tuple(theirs.encode(text)[:12]): text for text in TEXTS}
    for batch in loader:
        rows = [
            tuple(row[mask.bool()].tolist())
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        expected = collate([theirs(texts[row], truncation=True, max_length=12) for row in rows])

        assert list(batch) == ["input_ids", "attention_mask", "labels"]
        assert all(torch.equal(batch[name], expected[name]) for name in batch)


def test_their_collator_takes_the_label_of_a_real_end_token_and_ours_keeps_it(theirs, tmp_path):
    store = build(Texts(TEXTS), tmp_path / "ended", eos=True)
    batch = next(iter(StepLoader(Documents(store, 64), 4)))
    collate = transformers.DataCollatorForLanguageModeling(theirs, mlm=False)
    rows = [
        {"input_ids": row[mask.bool()].tolist()}
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    differs = batch["labels"] != collate(rows)["labels"]

    assert differs.sum() == 4
    assert (batch["labels"][differs] == 50256).all()


def test_ranks_share_a_step_and_epochs_follow(windows):
    """61 rows: the last step has 5, and the rank that has 2 of them fills up a third."""
    alone = StepLoader(windows, 8)
    epochs = [batch["input_ids"] for _ in range(2) for batch in alone]
    ranks = [StepLoader(windows, 4, rank=rank, world_size=2) for rank in (0, 1)]
    shared = []
    for _ in range(2):
        for pair in zip(*ranks, strict=True):
            assert len({batch["input_ids"].shape for batch in pair}) == 1
            rows = torch.cat([batch["input_ids"] for batch in pair])
            shared.append(rows[(torch.cat([b["labels"] for b in pair]) != -100).any(1)])

    assert len(alone) == len(ranks[0]) == 8
    assert all(torch.equal(one, two) for one, two in zip(epochs, shared, strict=True))
    assert not torch.equal(epochs[0], epochs[8])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_loader_resumes_where_it_was(windows, workers):
    loader = StepLoader(windows, 8, num_workers=workers)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    rest = [batch["input_ids"] for batch in batches]
    after = [batch["input_ids"] for batch in loader]
    resumed = StepLoader(windows, 4, rank=0, world_size=2)
    resumed.load_state_dict(state)

    assert state["position"] == 24
    assert (len(rest), len(after)) == (5, 8)
    for expected in (rest, after):  # of 5 rows that are left at last, rank 0 has 2
        found = [batch["input_ids"][batch["labels"][:, 1] != -100] for batch in resumed]
        halves = [batch[: len(batch) // 2] for batch in expected]
        assert all(torch.equal(one, two) for one, two in zip(found, halves, strict=True))
    with pytest.raises(ResumeError, match="no step of 7 rows begins"):
        StepLoader(windows, 7).load_state_dict(state)


def test_packs_and_items_are_for_models_too(store, windows):
    batch = next(iter(StepLoader(Packs(store, 32), 2)))
    item = RowItems(windows)[3]

    assert list(batch) == ["input_ids", "labels", "position_ids", "use_cache"]
    assert item["input_ids"].tolist() == windows.read([3])["tokens"][0, :17].tolist()
    assert torch.equal(item["input_ids"], item["labels"])
    assert len(RowItems(windows)) == len(windows)
    with pytest.raises(IndexError, match="does not exist; there are"):
        RowItems(windows)[len(windows)]


def test_what_cannot_be_loaded_is_refused(windows):
    with pytest.raises(PlanError, match="give Windows, Packs or Documents"):
        StepLoader([1, 2, 3], 2)
    with pytest.raises(PlanError, match="do not make one step of 999,999"):
        StepLoader(windows, 999_999)
    with pytest.raises(PlanError, match="labels='next' is not"):
        StepLoader(windows, 2, labels="next")
    with pytest.raises(PlanError, match="labels='next' is not"):
        RowItems(windows, labels="next")


def test_accelerate_leaves_it_as_it_is(windows):
    accelerate = pytest.importorskip("accelerate")
    loader = StepLoader(windows, 4)

    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader


@pytest.mark.slow
def test_two_processes_of_accelerate_share_each_step_once_and_skip_once(windows, tmp_path):
    """Real processes; `prepare`, `save_state`, `load_state` and `skip_first_batches` are theirs."""
    pytest.importorskip("accelerate")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = Path(__file__).parent / "accelerate_script.py"
    command = ["-W", "ignore", str(script)]
    command += [str(windows.stream.members[0].path), str(tmp_path)]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        zygote.Popen(
            command,
            env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        told = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)
    one, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    alone = StepLoader(windows, 8)
    expected = [batch["input_ids"].tolist() for _ in range(2) for batch in alone]

    assert one == other
    assert one["whole"] == expected
    assert one["resumed"] == expected[3:]
    assert one["skipped"] == expected[len(alone) + 3 :]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.torture)])
def test_a_trainer_that_was_stopped_goes_on_with_the_same_losses(
    windows, tmp_path, processes, monkeypatch, capsys
):
    pytest.importorskip("accelerate")
    words = [str(SCRIPT), str(windows.stream.members[0].path), str(tmp_path)]
    if processes == 1:  # here, where its packages are imported
        monkeypatch.setattr("sys.argv", words)
        verbosity = transformers.logging.get_verbosity()  # the script changes it
        runpy.run_path(str(SCRIPT), run_name="__main__")
        transformers.logging.set_verbosity(verbosity)
        shown = capsys.readouterr().out
    else:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = zygote.run(
            [*launch, *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        shown = done.stdout

    whole, stopped, resumed = (numbers_of(line) for line in shown.splitlines()[-3:])
    assert len(whole) > len(stopped) > 0
    assert stopped + resumed == whole
    logs = [tmp_path / name / "fingerprints.jsonl" for name in ("whole", "stopped")]
    assert logs[0].read_bytes() == logs[1].read_bytes()
    rows = Windows(windows.stream, 16)  # those of the script, with the seed of transformers
    reader = RowReader(StepLoader(rows, 8, seed=42).source.plan)
    lines = list(read_fingerprints(logs[0]))
    assert len(lines) == len(whole)
    starts = [0, *(each.position for each in lines[:-1])]
    for start, each in zip(starts, lines, strict=True):
        assert reader.fingerprints(start, each.position) == (each.rows, each.tokens)


@pytest.mark.parametrize(("batches", "drop_last"), [(1, False), (3, False), (4, True)])
def test_the_positions_of_optimizer_steps_are_those_that_a_loop_reads(windows, batches, drop_last):
    loader = StepLoader(windows, 4, drop_last=drop_last)
    read = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        ends = [loader.state_dict()["position"] for _ in loader]
        starts = [epoch * len(windows), *ends[:-1]]
        # With drop_last, the position after the last step is the end of the epoch.
        pairs = [(start, min(end, start + 4)) for start, end in zip(starts, ends, strict=True)]
        read += [pairs[first : first + batches] for first in range(0, len(pairs), batches)]
    for step, spans in enumerate(read, start=1):
        assert loader.spans(step, batches) == spans


def numbers_of(line):
    return [float(each) for each in line.split()]


def test_a_size_of_a_step_that_cannot_be_and_a_plan_are_refused(windows):
    for size, told in ((0, "batch_size=0 must be"), (2.5, "batch_size=2.5 is not a whole number")):
        with pytest.raises(PlanError, match=told):
            StepLoader(windows, size)
    for rows in (Plan(windows), Transformed(windows, TokenDropout(0.1))):
        with pytest.raises(PlanError, match=r'penstock.Loader\(…, format="hf"\)'):
            StepLoader(rows, 2)


def test_single_rows_count_from_the_end_too(windows):
    items = RowItems(windows)

    assert torch.equal(items[-1]["input_ids"], items[len(items) - 1]["input_ids"])
    with pytest.raises(PlanError, match="is not a whole number"):
        items[:3]


def test_rows_and_a_dataset_to_train_on_are_refused_together(windows):
    with pytest.raises(PlanError, match="train_rows and train_dataset are both given"):
        RowsTrainer(train_rows=windows, train_dataset=[])
