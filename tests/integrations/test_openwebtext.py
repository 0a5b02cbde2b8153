"""Local text files under Lightning: streamed, preprocessed, and the batch that fits."""

import copy
from pickle import dumps, loads

import numpy as np
import pytest
import torch

pytest.importorskip("lightning", reason="needs penstock[lightning]")

from penstock import Texts, build
from penstock.errors import PlanError, SourceError, StoreError
from penstock.integrations.lightning import LocalOpenWebTextDataModule, debug_datamodule
from penstock.preprocess import preprocess
from penstock.sources.slices import cut

LINES = [f"document {number} says {number**3 % 9973}." for number in range(120)]


@pytest.fixture
def files(tmp_path):
    """A training and a validation file, with blank lines."""
    train, val = tmp_path / "train.txt", tmp_path / "val.txt"
    train.write_text("\n\n".join(LINES) + "\n")
    val.write_text("\n".join(LINES[:20]) + "\n")
    return {"train_file": train, "val_file": val}


@pytest.fixture
def module(files):
    def module(**options):
        defaults = {"max_length": 16, "batch_size": 4, "num_workers": 0, "tokenizer": "bytes"}
        made = LocalOpenWebTextDataModule(**files, **{**defaults, **options})
        made.prepare_data()
        made.setup("fit")
        made_here.append(made)
        return made

    made_here = []
    yield module
    for made in made_here:
        made.teardown("fit")


def test_flat_ids_without_a_header_are_refused_in_words(module, tmp_path):
    path = tmp_path / "train.bin"
    path.write_bytes(bytes(1000))
    with pytest.raises(PlanError, match=r"preprocessed_train='.*train.bin' must be a \.npy file"):
        module(use_preprocessed=True, preprocessed_train=path, preprocessed_val=path)


def rows_of(batches):
    return [tuple(row.tolist()) for batch in batches for row in batch["input_ids"]]


def stream_of(lines):
    return [token for line in lines for token in (*line.encode(), 256)]


def test_the_signature_is_the_one_people_know():
    made = LocalOpenWebTextDataModule()

    assert str(made.train_file) == "training_data/owt_train.txt"
    assert str(made.val_file) == "training_data/owt_valid.txt"
    assert (made.max_length, made.batch_size, made.num_workers) == (1024, None, 8)
    assert (made.prefetch_factor, made.buffer_size, made.chunk_size) == (4, 50_000, 10_000)
    assert str(made.preprocessed_val) == "training_data/owt_val_preprocessed.npy"


@pytest.mark.parametrize("labels", ["shifted", "same"])
def test_batches_are_windows_with_labels(module, labels):
    batch = next(iter(module(labels=labels).train_dataloader()))

    assert list(batch) == ["input_ids", "labels"]
    assert all(values.shape == (4, 16) for values in batch.values())
    assert all(values.dtype == torch.int64 for values in batch.values())
    assert all(values.is_contiguous() for values in batch.values())
    if labels == "shifted":
        assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    else:
        assert torch.equal(batch["input_ids"], batch["labels"])


def test_nothing_is_lost_and_the_last_row_is_filled_up(module):
    batches = list(module().val_dataloader())
    expected = stream_of(LINES[:20])
    targets = torch.cat([batch["labels"] for batch in batches]).flatten()

    assert targets[targets != -100].tolist() == expected[1:]
    assert (targets == -100).sum() == -(len(expected) - 1) % 16


def test_streaming_reads_every_row_once_with_any_number_of_threads(module, tmp_path):
    found = [
        rows_of(module(num_workers=number, cache_dir=tmp_path / str(number)).train_dataloader())
        for number in (0, 1, 2, 8)
    ]
    rows = -(-(len(stream_of(LINES)) - 1) // 16)

    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[0]) == rows // 4 * 4
    assert len(set(found[0])) == len(found[0])


@pytest.mark.parametrize("options", [{"buffer_size": 7}, {"chunk_size": 3}])
def test_how_text_is_read_changes_no_row(module, tmp_path, options):
    expected = rows_of(module().train_dataloader())

    other = module(cache_dir=tmp_path / "other", **options)
    assert rows_of(other.train_dataloader()) == expected


def test_an_impossible_buffer_is_refused():
    with pytest.raises(PlanError, match="chunk_size=0 must be at least 1"):
        LocalOpenWebTextDataModule(chunk_size=0)
    with pytest.raises(PlanError, match="prefetch_factor=0 must be at least 1"):
        LocalOpenWebTextDataModule(prefetch_factor=0)
    assert LocalOpenWebTextDataModule(prefetch_factor=0, num_workers=0).prefetch_factor == 0
    assert LocalOpenWebTextDataModule(prefetch_factor=None).prefetch_factor is None
    with pytest.raises(PlanError, match="batch_size=0 must be at least 1"):
        LocalOpenWebTextDataModule(batch_size=0)
    with pytest.raises(PlanError, match="labels='next' is not"):
        LocalOpenWebTextDataModule(labels="next")


def test_rows_of_all_devices_are_shared_out_without_a_trial(module):
    made = module(batch_size=None, global_batch_size=6)

    assert made.batch_size is None
    assert len(next(iter(made.train_dataloader()))["input_ids"]) == 6


@pytest.mark.parametrize("streaming", [False, True])
def test_a_copy_of_a_module_has_its_rows(module, streaming):
    made = module(tokenizer="gpt2", streaming=streaming)
    copies = [copy.deepcopy(made), loads(dumps(made))]
    expected = next(iter(made.train_dataloader()))["input_ids"]

    for each in copies:
        assert torch.equal(next(iter(each.train_dataloader()))["input_ids"], expected)
        each.teardown("fit")


def test_a_finished_stream_has_a_length_and_the_same_rows_again(module):
    first = module()
    rows = rows_of(first.train_dataloader())
    first.teardown("fit")
    again = module().train_dataloader()

    assert len(again) == len(rows) // 4
    assert rows_of(again) == rows


def test_too_little_text_for_one_step_is_told_at_the_first_batch(module):
    """And not by a batch that holds rows twice."""
    batches = iter(module(batch_size=1_000).train_dataloader())

    with pytest.raises(PlanError, match="one step of training takes 1,000"):
        next(batches)


def test_preprocessed_files_are_read_without_the_text(files, tmp_path):
    for side, name in (("train_file", "owt_train"), ("val_file", "owt_val")):
        preprocess(files[side], tmp_path / f"{name}_preprocessed.npy", tokenizer="bytes")
        files[side].unlink()
    made = LocalOpenWebTextDataModule(
        **files, use_preprocessed=True, max_length=16, batch_size=4, num_workers=2
    )
    made.prepare_data()
    made.setup()

    found = rows_of(made.train_dataloader())
    starts = range(0, len(stream_of(LINES)) - 1, 16)
    stream = np.array(stream_of(LINES) + [0] * 32)
    expected = {tuple(stream[start : start + 16].tolist()) for start in starts}
    assert set(found) <= expected
    assert len(found) == len(set(found)) == len(starts) // 4 * 4
    assert len(rows_of(made.test_dataloader())) == len(made.val_dataset)


@pytest.mark.parametrize("labels", ["shifted", "same"])
def test_preprocessed_and_streamed_rows_have_one_order_with_part(
    module, files, tmp_path, monkeypatch, labels
):
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 700)  # several parts
    for side, name in (("train_file", "train"), ("val_file", "val")):
        preprocess(files[side], tmp_path / f"{name}.npy", tokenizer="bytes")
    arrays = {f"preprocessed_{side}": tmp_path / f"{side}.npy" for side in ("train", "val")}

    streamed = module(labels=labels)
    expected = [batch["input_ids"].tolist() for batch in streamed.train_dataloader()]
    others = [
        module(labels=labels, shuffle="part", streaming=False),
        module(labels=labels, shuffle="part", use_preprocessed=True, **arrays),
        module(labels=labels, shuffle="part", use_preprocessed=True, num_workers=2, **arrays),
    ]

    assert len(others[0].train_dataset.part_rows) > 2
    for other in others:
        assert [batch["input_ids"].tolist() for batch in other.train_dataloader()] == expected
    # Without shuffle="part", preprocessed rows are shuffled as a whole.
    whole = module(labels=labels, use_preprocessed=True, **arrays)
    batches = [batch["input_ids"].tolist() for batch in whole.train_dataloader()]
    assert batches != expected
    assert len(batches) == len(expected)


def test_parts_of_other_tokens_are_refused(module, files, tmp_path, monkeypatch):
    path = tmp_path / "train.npy"
    with monkeypatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 700)
        preprocess(files["train_file"], path, tokenizer="bytes")
    np.save(path, np.load(path)[:-1])
    options = {"use_preprocessed": True, "preprocessed_train": path, "preprocessed_val": path}

    with pytest.raises(StoreError, match=r"train\.parts\.json lists .* tokens, but .* has"):
        module(**options, shuffle="part")
    assert next(iter(module(**options).train_dataloader()))  # needs no parts


def test_a_new_preprocessed_file_of_one_part_replaces_the_parts_of_the_old_one(
    module, files, tmp_path, monkeypatch
):
    path = tmp_path / "train.npy"
    with monkeypatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 700)
        preprocess(files["train_file"], path, tokenizer="bytes")
    preprocess(files["val_file"], path, tokenizer="bytes", overwrite=True)

    options = {"use_preprocessed": True, "preprocessed_train": path, "preprocessed_val": path}
    assert next(iter(module(**options, shuffle="part").train_dataloader()))


@pytest.mark.parametrize("shuffle", ["full", "none", "block"])
def test_an_order_of_all_rows_is_refused_while_streaming(files, shuffle):
    with pytest.raises(PlanError, match="streaming=False"):
        LocalOpenWebTextDataModule(**files, shuffle=shuffle)
    assert LocalOpenWebTextDataModule(**files, shuffle=shuffle, streaming=False)
    assert LocalOpenWebTextDataModule(**files, shuffle=shuffle, use_preprocessed=True)


def test_an_unknown_order_is_refused(files):
    with pytest.raises(PlanError, match="shuffle='parts' is not"):
        LocalOpenWebTextDataModule(**files, shuffle="parts", streaming=False)


def test_a_missing_file_names_path_directory_and_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SourceError) as error:
        LocalOpenWebTextDataModule().prepare_data()
    told = str(error.value)
    assert "training_data/owt_train.txt does not exist" in told
    assert f"working directory: {tmp_path}" in told
    assert "penstock fetch openwebtext --output training_data" in told
    with pytest.raises(SourceError, match=r"python -m penstock\.preprocess --train_file"):
        LocalOpenWebTextDataModule(use_preprocessed=True).setup("fit")


def test_a_missing_file_that_no_command_makes_is_not_advised_to_be_fetched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SourceError, match=r"my\.txt does not exist .* with train_file=\.$"):
        LocalOpenWebTextDataModule("my.txt", "other.txt").prepare_data()


def test_a_loader_before_setup_says_so(files):
    with pytest.raises(PlanError, match="call setup"):
        LocalOpenWebTextDataModule(**files).train_dataloader()


def test_without_a_gpu_the_batch_is_32(module):
    made = module(batch_size=None, max_length=4)

    assert made.batch_size == 32
    assert next(iter(made.train_dataloader()))["input_ids"].shape == (32, 4)


def test_without_streaming_rows_are_shuffled_as_a_whole(module, tmp_path):
    streamed, built = module(), module(streaming=False)
    left, right = rows_of(streamed.train_dataloader()), rows_of(built.train_dataloader())

    assert len(left) == len(right)
    assert left != right or len(streamed.train_dataset.stream.ends) == 1


def test_debug_shows_its_batches_too(module, capsys):
    debug_datamodule(module())

    assert "Keys available: dict_keys(['input_ids', 'labels'])" in capsys.readouterr().out


def test_labels_of_the_naive_reader_are_ours(module, tmp_path):
    store = build(Texts(LINES), tmp_path / "store", tokenizer="bytes")

    assert store.tokens(0, store.num_tokens).tolist() == stream_of(LINES)
