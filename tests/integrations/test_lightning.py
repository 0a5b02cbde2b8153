"""Lightning's data module over rows of text: stages, batches, padding, what is told."""

import copy
import itertools
import json
import weakref
from pickle import dumps, loads
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lightning", reason="needs penstock[lightning]")

from penstock import Chat, Packs, Texts, TokenStore, build
from penstock.errors import PlanError, ResumeError, SourceError, StoreError, TokenizerError
from penstock.integrations.huggingface import hf_tokenizer
from penstock.integrations.lightning import LLMDataModule, debug_datamodule
from penstock.integrations.lightning.loaders import evaluation_cuts
from penstock.sources.slices import cut
from penstock.tokenize.tokenizer import load_tokenizer

ROWS = [f"row {number} " + "is longer " * (number % 7) for number in range(50)]


@pytest.fixture
def sides(tmp_path):
    """A training, a validation and a test file, with blank rows."""
    found = {}
    for side, rows in (("train", ROWS), ("val", ROWS[:9]), ("test", ROWS[:5])):
        path = tmp_path / f"{side}.txt"
        path.write_text("\n\n".join(rows) + "\n")
        found[side] = path
    return found


@pytest.fixture
def module(sides):
    def module(*stages, **options):
        options = {"num_workers": 0, "batch_size": 4, "data": sides, **options}
        made = LLMDataModule(options.pop("model_name", "bytes"), **options)
        for stage in stages or ("fit",):
            made.setup(stage)
        return made

    return module


def rows_of(batches):
    """The ids of every row, without padding; of packed rows, with it."""
    return [
        tuple(row[kept.bool()].tolist())
        for batch in batches
        for row, kept in zip(
            batch["input_ids"],
            batch.get("attention_mask", torch.ones_like(batch["input_ids"])),
            strict=True,
        )
    ]


def test_the_defaults_are_those_of_the_code_it_replaces():
    module = LLMDataModule()

    assert (module.model_name, module.batch_size, module.max_length) == ("gpt2", 32, 128)
    assert module.num_workers == torch.multiprocessing.cpu_count()
    assert module.tokenizer.pad_token == module.tokenizer.eos_token == "<|endoftext|>"
    assert module.tokenizer.decode([15496, 995]) == "Hello world"


@pytest.mark.parametrize(
    ("stage", "opened"),
    [
        ("fit", {"train", "val"}),
        ("validate", {"val"}),
        ("test", {"test"}),
        (None, {"train", "val", "test"}),
    ],
)
def test_a_stage_opens_what_it_needs(module, stage, opened):
    made = module(stage)
    sides = ("train", "val", "test")

    assert {side for side in sides if getattr(made, f"{side}_dataset") is not None} == opened


def test_an_unknown_stage_is_refused(module):
    with pytest.raises(PlanError, match="stage='train' is not"):
        module("train")


def test_a_loader_before_setup_says_so(sides):
    made = LLMDataModule("bytes", data=sides)

    with pytest.raises(PlanError, match=r'call setup\("fit"\) first'):
        made.train_dataloader()
    with pytest.raises(PlanError, match=r'call setup\("test"\) first'):
        made.test_dataloader()


def test_the_dataset_of_a_loader_says_how_to_read_a_batch(module):
    with pytest.raises(TypeError, match=r"makes whole batches.*next\(iter\(loader\)\)"):
        module().train_dataloader().dataset[0]


def test_streamed_data_is_closed_after_training_and_can_be_described_again(module):
    made = module(streaming=True)
    made.teardown("fit")

    with pytest.raises(PlanError, match=r'is not open: call setup\("fit"\).*when training ends'):
        made.report("train")
    made.setup("fit")
    assert made.report("train").startswith("train: ")


def test_a_side_that_was_not_given_is_named(module, sides):
    made = module(data={"train": sides["train"]})

    with pytest.raises(PlanError, match='data= has no "val"; it has train'):
        made.val_dataloader()
    with pytest.raises(PlanError, match='Add "test" to data='):
        made.test_dataloader()


def test_a_catalog_dataset_that_was_not_fetched_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SourceError, match="prepare_data"):
        LLMDataModule().setup("fit")


def test_a_catalog_dataset_is_read_under_the_names_that_fetch_gives_its_files(tmp_path):
    for name in ("owt_train.txt", "owt_valid.txt"):
        (tmp_path / name).write_text("\n".join(ROWS) + "\n")
    made = LLMDataModule("bytes", data="openwebtext", data_dir=tmp_path)
    made.setup("fit")

    assert len(made.train_dataset) == len(made.val_dataset) == 50


@pytest.mark.parametrize("packing", [False, True])
def test_train_dataset_can_be_indexed_and_iterated(module, packing):
    rows = module(packing=packing).train_dataset

    assert len(list(rows)) == len(rows)
    assert rows[0]["tokens"].tolist() == next(iter(rows))["tokens"].tolist()
    assert rows[-1]["tokens"].tolist() == rows[len(rows) - 1]["tokens"].tolist()
    assert rows[0]["attention_mask"].any()
    assert rows.origins(0)[0].text().startswith(ROWS[0][:5])
    with pytest.raises(IndexError, match="is not among"):
        rows[len(rows)]


def test_labels_are_the_ids_and_ignored_exactly_where_the_mask_is_zero(module):
    batch = next(iter(module().train_dataloader()))

    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert type(batch) is dict
    assert all(values.dtype == torch.int64 for values in batch.values())
    ignored = batch["attention_mask"] == 0
    assert ignored.any()
    assert torch.equal(batch["labels"] == -100, ignored)
    assert torch.equal(batch["labels"][~ignored], batch["input_ids"][~ignored])
    assert (batch["input_ids"][ignored] == 256).all()


def test_a_batch_is_as_wide_as_its_longest_row(module, tmp_path):
    made = module(data={"train": Texts(["a" * 10, "b" * 14, "c" * 8])}, batch_size=3)

    assert next(iter(made.train_dataloader()))["input_ids"].shape == (3, 14)


def test_a_larger_limit_changes_no_batch_without_longer_rows(module):
    one, other = (list(module(max_length=size).train_dataloader()) for size in (128, 1024))

    assert len(one) == len(other) == 13
    assert all(
        torch.equal(left[name], right[name])
        for left, right in zip(one, other, strict=True)
        for name in left
    )


def test_rows_that_are_cut_and_blank_rows_are_told(module):
    made = module(max_length=20)

    told = made.report("train")
    assert "49 blank rows of the text were skipped" in told
    long = sum(len(row) > 20 for row in ROWS)
    assert f"{long} rows were cut off after max_length=20 tokens" in told
    assert 'overflow="split" or packing=True keeps them' in told
    cut = sum(max(0, len(row) - 20) for row in ROWS)
    assert f"loses {cut:,} tokens" in told


def test_split_rows_lose_nothing(module):
    made = module(max_length=20, overflow="split")
    found = rows_of(made.train_dataloader())

    assert max(map(len, found)) == 20
    assert "cut off" not in made.report("train")


def test_a_real_end_token_keeps_its_label(module):
    batch = next(iter(module(model_name="gpt2", eos=True).train_dataloader()))
    last = batch["attention_mask"].sum(dim=1) - 1
    rows = torch.arange(len(last))

    assert (batch["input_ids"][rows, last] == 50256).all()
    assert (batch["labels"][rows, last] == 50256).all()


def test_shifted_labels_are_of_what_follows(module):
    batch = next(iter(module(labels="shifted").train_dataloader()))
    follows = batch["attention_mask"][:, 1:] == 1

    assert torch.equal(batch["labels"][:, :-1][follows], batch["input_ids"][:, 1:][follows])
    assert (batch["labels"][:, :-1][~follows] == -100).all()
    assert (batch["labels"][:, -1] == -100).all()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"labels": "shift"}, "labels='shift' is not"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": -1}, "batch_size=-1 must be at least 1"),
        ({"batch_size": None}, "batch_size and global_batch_size are both None"),
        ({"global_batch_size": 0}, "global_batch_size=0 must be at least 1"),
        ({"batch_size": 4.0}, "batch_size=4.0 is not a whole number"),
        ({"batch_size": "4"}, "batch_size='4' is not a whole number"),
        ({"seed": "x"}, "seed='x' is not a whole number"),
        ({"padding_side": "Left"}, "padding_side='Left' is not"),
        ({"on_change": "begin"}, "on_change='begin' is not"),
    ],
)
def test_arguments_that_cannot_work_are_refused(sides, options, told):
    with pytest.raises(PlanError, match=told):
        LLMDataModule("bytes", data=sides, **options)


def test_a_batch_may_be_said_for_all_devices_alone(module):
    made = module(batch_size=None, global_batch_size=6)

    assert len(next(iter(made.train_dataloader()))["input_ids"]) == 6
    assert [len(batch["input_ids"]) for batch in made.val_dataloader()] == [6, 3]
    for devices in (2, 3):
        made = module(batch_size=None, global_batch_size=6)
        made.trainer = a_trainer(0)
        made.trainer.distributed_sampler_kwargs = {"rank": 0, "num_replicas": devices}
        assert len(next(iter(made.train_dataloader()))["input_ids"]) == 6 // devices
    made.trainer.distributed_sampler_kwargs = {"rank": 0, "num_replicas": 4}
    with pytest.raises(PlanError, match=r"does not divide over 4 devices. Use a multiple of 4"):
        made.val_dataloader()


@pytest.mark.parametrize("model_name", [pytest.param("gpt2", marks=pytest.mark.torture), "bytes"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: loads(dumps(made))])
@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"packing": True}])
def test_a_copy_of_a_module_goes_on_as_the_module(sides, model_name, copied, options):
    made = LLMDataModule(
        model_name, 2, 16, data={"train": sides["train"]}, num_workers=0, **options
    )
    early = copied(made)
    for each in (made, early):
        each.setup("fit")
    batches = iter(made.train_dataloader())
    begun = [next(batches) for _ in range(3)]
    late = copied(made)

    assert rows_of(itertools.islice(early.train_dataloader(), 3)) == rows_of(begun)
    assert rows_of(itertools.islice(late.train_dataloader(), 1)) == rows_of([next(batches)])
    batches.close()
    for each in (made, early, late):
        each.teardown("fit")


def test_packing_removes_the_padding_and_loses_nothing(module):
    made = module(packing=True, max_length=64, batch_size=2)
    batches = list(made.train_dataloader())
    batch = batches[0]

    assert list(batch) == ["input_ids", "labels", "position_ids", "use_cache"]
    begins = batch["position_ids"] == 0
    assert (batch["labels"][begins] == -100).all()
    trained = batch["labels"] != -100
    assert torch.equal(batch["labels"][trained], batch["input_ids"][trained])
    assert (batch["input_ids"][~trained & ~begins] == made.pad_id).all()
    assert made.train_dataset.padding_share < 0.15
    assert made.train_dataset.num_tokens == sum(len(row) - 1 for row in ROWS)
    with pytest.raises(PlanError, match="truncates nothing"):
        module(packing=True, overflow="split")


def test_the_first_batch_of_packed_rows_is_shown_too(module, capsys):
    debug_datamodule(module(packing=True, max_length=64))
    printed = capsys.readouterr().out

    assert (
        "Keys available: dict_keys(['input_ids', 'labels', 'position_ids', 'use_cache'])" in printed
    )
    assert "Padding: Packs(" in printed
    assert "% padding" in printed


def test_an_epoch_holds_every_row_once_and_the_next_another_order(module):
    loader = module(batch_size=5).train_dataloader()
    one, other = rows_of(loader), rows_of(loader)

    assert sorted(one) == sorted(other)
    assert len(set(one)) == 50
    assert one != other


def test_rows_that_fill_no_batch_are_a_smaller_one_or_left_out(module):
    loader = module(batch_size=8).train_dataloader()
    sizes = [[len(batch["input_ids"]) for batch in loader] for _ in range(2)]

    assert len(loader) == 7
    assert sizes == [[8] * 6 + [2]] * 2
    loader = module(batch_size=8, drop_last=True).train_dataloader()
    epochs = [rows_of(loader) for _ in range(3)]
    assert len(loader) == 6
    assert [len(set(epoch)) for epoch in epochs] == [48] * 3
    assert len({row for epoch in epochs for row in epoch}) == 50  # others are left out each time


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_make_the_same_batches(module, workers):
    expected, found = (module(num_workers=number) for number in (0, workers))

    for name in ("train_dataloader", "val_dataloader"):
        assert rows_of(getattr(found, name)()) == rows_of(getattr(expected, name)())


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.torture)])
@pytest.mark.parametrize("name", ["train_dataloader", "val_dataloader"])
def test_workers_that_were_not_forked_make_the_same_batches(module, name, method):
    expected, found = (getattr(module(num_workers=number), name)() for number in (0, 1))
    found.multiprocessing_context = method

    assert rows_of(found) == rows_of(expected)


def test_validation_is_in_order_and_complete(module):
    batches = list(module().val_dataloader())

    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 1]
    assert ["".join(map(chr, row)) for row in rows_of(batches)] == ROWS[:9]


def test_evaluation_deals_every_row_once_in_equally_many_steps_of_at_least_one_row():
    for num_rows in range(1, 40):
        for size in (1, 2, 3, 8):
            for world in range(1, min(num_rows, 5) + 1):
                ranks = [evaluation_cuts(num_rows, size, rank, world) for rank in range(world)]
                dealt = [row for cuts in ranks for cut in cuts for row in range(*cut)]
                sizes = [stop - first for cuts in ranks for first, stop in cuts]

                assert dealt == list(range(num_rows))
                assert len({len(cuts) for cuts in ranks}) == 1
                assert min(sizes) >= 1
                assert max(sizes) <= size + 1


def test_fewer_rows_than_devices_cannot_be_evaluated():
    with pytest.raises(PlanError, match="2 rows cannot be evaluated on 3 devices"):
        evaluation_cuts(2, 4, rank=0, world_size=3)


def test_too_little_text_for_one_step_is_told_with_the_numbers(module):
    with pytest.raises(PlanError, match="50 rows, and one step of training takes 64"):
        module(batch_size=64).train_dataloader()


def test_state_goes_on_where_it_was_taken(module):
    made = module()
    batches = iter(made.train_dataloader())
    for _ in range(5):
        next(batches)
    state = made.state_dict()
    rest = rows_of(batches)
    resumed = module()
    resumed.load_state_dict(state)

    assert state["data"]["position"] == 20
    assert rows_of(resumed.train_dataloader())[: len(rest)] == rest
    resumed = module()
    loader = resumed.train_dataloader()
    loader.load_state_dict(state)
    assert rows_of(loader)[: len(rest)] == rest


def a_trainer(batches):
    """As much of a Trainer as a data module asks."""
    total = SimpleNamespace(completed=batches, processed=batches)
    epoch_loop = SimpleNamespace(batch_progress=SimpleNamespace(total=total))
    return SimpleNamespace(
        overfit_batches=0,
        distributed_sampler_kwargs=None,
        fit_loop=SimpleNamespace(epoch_loop=epoch_loop),
        strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision),
    )


def test_a_module_goes_on_under_another_trainer_and_begins_anew_without_a_checkpoint(module):
    made = module()
    everything = rows_of(made.train_dataloader())
    made.trainer = a_trainer(3)
    made.train_dataloader()
    state = made.state_dict()
    made.trainer = a_trainer(3)
    made.load_state_dict(state)
    resumed = rows_of(made.train_dataloader())
    made.trainer = a_trainer(0)

    assert state["data"]["position"] == 12
    assert resumed[:38] == everything[12:]
    assert rows_of(made.train_dataloader()) == everything


def test_steps_keep_their_rows_on_another_number_of_devices(module):
    state = {**_state_of(module()), "devices": 1}
    for devices, expected in ((2, 4), (4, 4), (3, 12)):
        made = module()
        made.trainer = a_trainer(3)
        made.trainer.distributed_sampler_kwargs = {"rank": 0, "num_replicas": devices}
        made.load_state_dict(state)
        made.train_dataloader()

        assert made.progress.source.global_batch == expected
        assert made.progress.begin() == 12
    other = module(batch_size=5)
    other.load_state_dict(state)
    other.train_dataloader()
    assert other.progress.source.global_batch == 5
    other = module(global_batch_size=5)
    other.trainer = a_trainer(0)
    other.trainer.distributed_sampler_kwargs = {"rank": 0, "num_replicas": 2}
    with pytest.raises(PlanError, match="global_batch_size=5 does not divide over 2 devices"):
        other.train_dataloader()


def _state_of(made):
    batches = iter(made.train_dataloader())
    for _ in range(3):
        next(batches)
    return made.state_dict()


def test_a_module_without_progress_has_no_state(sides):
    assert LLMDataModule("bytes", data=sides).state_dict() == {}


def test_a_state_of_other_data_is_refused(module):
    made = module()
    loader = made.train_dataloader()
    next(iter(loader))

    other = module(max_length=20)
    other.load_state_dict(made.state_dict())
    with pytest.raises(ResumeError, match="another order of the data"):
        other.train_dataloader()
    with pytest.raises(ResumeError, match="is not the state of a data module"):
        loader.load_state_dict({"step": 3})


def test_stores_and_lists_are_data_too(module, sides, tmp_path):
    built = build(
        sides["train"], tmp_path / "store", tokenizer="bytes", eos=False, documents="lines"
    )
    made = module(data={"train": built.path, "validation": built})

    assert isinstance(made.val_dataset.stream.members[0], TokenStore)
    assert len(made.train_dataset) == len(made.val_dataset) == 50
    with pytest.raises(SourceError, match="has the key 'training'"):
        module(data={"training": built})


def test_a_file_as_data_is_refused_with_the_mapping_to_write(sides):
    for given in (sides["train"], str(sides["train"])):
        with pytest.raises(SourceError, match=r'train.txt. is neither .* data=\{"train": …'):
            LLMDataModule("bytes", data=given)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_store_of_another_tokenizer_is_refused_with_the_one_to_pass(module, sides, streaming):
    store = build(sides["train"], sides["train"].with_name("store"), documents="lines")
    chat = json.dumps({"messages": [{"role": "assistant", "content": "ok"}]})
    (chats := sides["train"].with_name("chats.jsonl")).write_text(chat)
    chatted = build(chats, chats.with_name("chat"), chat=Chat("chatml", "gpt2", add_tokens="auto"))

    for given in (store, str(store.path)):
        with pytest.raises(StoreError, match=r"tokenized with gpt2 .*load_tokenizer\('gpt2'\)"):
            module(data={"train": given}, streaming=streaming)
    with pytest.raises(StoreError, match=r"load_tokenizer\('gpt2', add_tokens=\['<.im_start.>',"):
        module(data={"train": chatted}, model_name="gpt2")
    tokenizer = load_tokenizer("gpt2", add_tokens=["<|im_start|>", "<|im_end|>"])
    assert len(module(data={"train": chatted}, tokenizer=tokenizer).train_dataset) == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_the_directory_of_a_split_build_names_its_stores(module, sides, streaming):
    path = sides["train"].with_name("store")
    build(sides["train"], path, tokenizer="bytes", documents="lines", split="tail:0.2")

    with pytest.raises(StoreError, match=r"was built with a split. Open .*train instead"):
        module(data={"train": path}, streaming=streaming)
    assert len(module(data={"train": path / "train"}, streaming=streaming).train_dataset)


def test_a_changed_module_may_restart_the_order(module):
    made = module()
    batches = iter(made.train_dataloader())
    for _ in range(3):
        next(batches)
    state = made.state_dict()

    changed = module(max_length=20)
    changed.load_state_dict(state)
    with pytest.raises(ResumeError, match=r'LLMDataModule\(…, on_change="restart"\)'):
        changed.train_dataloader()
    changed = module(max_length=20, on_change="restart")
    changed.load_state_dict(state)
    fresh = rows_of(module(max_length=20).train_dataloader())
    assert rows_of(changed.train_dataloader()) == fresh
    same = module(on_change="restart")  # an unchanged run continues
    same.load_state_dict(state)
    assert rows_of(same.train_dataloader()) == rows_of(batches)


def test_a_second_module_finds_the_store_of_the_first(module, cache):
    module().prepare_data()
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")}
    module().prepare_data()

    assert before == {path: path.stat().st_mtime_ns for path in cache.rglob("*.npy")}
    assert before


def test_debug_prints_the_lines_people_know(module, capsys):
    debug_datamodule(module(model_name="gpt2"))
    lines = capsys.readouterr().out.splitlines()

    assert lines[0] == "Keys available: dict_keys(['input_ids', 'attention_mask', 'labels'])"
    assert lines[1].startswith("Input Shape: torch.Size([4, ")
    assert lines[2:4] == ["", "--- Sample Text (Decoded) ---"]
    assert lines[4].startswith("row ")
    assert lines[4].endswith("...")
    assert lines[5:7] == ["", "Labels included? True"]
    assert lines[7].startswith("Padding: ")


def test_packs_and_documents_of_one_store_hold_the_same_text(module, sides):
    packed = module(packing=True, max_length=256)

    assert isinstance(packed.train_dataset.packs, Packs)
    assert packed.train_dataset.num_tokens == module(max_length=256).train_dataset.num_tokens


def test_streaming_gives_windows_of_the_text_and_every_target_once(module):
    made = module(streaming=True, max_length=16, batch_size=1)
    batches = list(made.train_dataloader())
    made.teardown("fit")
    counted = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    stream = [token for row in ROWS for token in (*row.encode(), 256)]
    rows = -(-(len(stream) - 1) // 15)  # they overlap by one token

    assert list(batches[0]) == ["input_ids", "attention_mask", "labels"]
    assert len(batches) == rows
    assert all(batch["input_ids"].shape == (1, 16) for batch in batches)
    filled = sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert counted == filled - rows == len(stream) - 1


@pytest.mark.parametrize("grown", [False, True])
def test_streaming_packs_what_the_finished_text_packs_and_goes_on(
    module, tmp_path, monkeypatch, grown
):
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 300)
    options = {"packing": True, "max_length": 64, "batch_size": 1}
    packed = module(**options, cache_dir=tmp_path / "packed")

    def streaming(name):
        return module(**options, streaming=True, cache_dir=tmp_path / name)

    made = streaming("one")
    batches = iter(made.train_dataloader())
    begun = [next(batches) for _ in range(5)]
    state = made.state_dict()
    rest = list(batches)
    other = streaming("other" if grown else "one")
    other.load_state_dict(state)

    assert list(rest[0]) == ["input_ids", "labels", "position_ids", "use_cache"]
    assert len(packed.train_dataset.part_rows) > 3
    assert sorted(rows_of(begun + rest)) == sorted(rows_of(packed.train_dataloader()))
    assert rows_of(other.train_dataloader())[: len(rest)] == rows_of(rest)
    assert "Packs(" in made.report("train")
    for each in (made, other):
        each.teardown("fit")


def test_transformers_is_imported_for_its_tokenizer_alone(python):
    code = """
import sys
from penstock.integrations.huggingface import StepLoader, hf_tokenizer
before = "transformers" in sys.modules
print(before, hf_tokenizer("gpt2").encode("Hello world"), "transformers" in sys.modules)
"""

    assert python(code).stdout == "False [15496, 995] True\n"


def test_a_name_of_tiktoken_is_refused_with_advice_that_can_be_followed():
    with pytest.raises(TokenizerError, match=r"tiktoken:gpt2 .*Use a tokenizer\.json") as caught:
        hf_tokenizer("tiktoken:gpt2")

    assert "tokenizer=" not in str(caught.value)  # hf_tokenizer has no such argument


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_the_tokenizer_gives_the_ids_of_the_store_without_network(module, name):
    text = "naïve café, 日本語, it's 3.14\n\ttabs"
    tokenizer = module(model_name=name).tokenizer

    assert tokenizer.encode(text) == load_tokenizer(name).encode(text).tolist()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == load_tokenizer(name).eos_id
    assert tokenizer(["a", "b c"], padding=True)["attention_mask"][0][-1] == 0
    assert load_tokenizer(tokenizer).encode(text).tolist() == tokenizer.encode(text)


@pytest.mark.parametrize("name", ["train_dataloader", "val_dataloader"])
def test_a_loader_refers_to_itself_nowhere(module, name):
    """Or its workers would be ended by the garbage collector, which takes seconds."""
    made = module()
    loader = getattr(made, name)()
    list(loader)
    gone = weakref.ref(loader)
    del loader

    assert gone() is None


def test_wikitext_as_people_try_it(data, capsys):
    """Look at a batch; raise the limit, which changes no batch that was not cut; pack."""
    folder = data / "wikitext-2-raw"
    sides = {"train": folder / "train_first_1MB.txt", "val": folder / "train_5k_filtered.txt"}
    debug_datamodule(LLMDataModule(batch_size=2, data=sides, num_workers=0))
    made = LLMDataModule(batch_size=2, data=sides, num_workers=0)
    made.setup("fit")
    longer = LLMDataModule(batch_size=2, max_length=1024, data=sides, num_workers=0)
    longer.setup("fit")
    packed = LLMDataModule(batch_size=4, data=sides, num_workers=0, packing=True)
    packed.setup("fit")

    assert "Labels included? True" in capsys.readouterr().out
    assert "773 rows were cut off" in made.report("train")
    assert "cut off" not in longer.report("train")
    pairs = list(zip(made.train_dataloader(), longer.train_dataloader(), strict=True))
    whole = [pair for pair in pairs if pair[1]["input_ids"].shape[1] <= 128]
    assert len(whole) > 10
    assert all(torch.equal(one[name], other[name]) for one, other in whole for name in one)
    assert packed.train_dataset.padding_share < 0.001
