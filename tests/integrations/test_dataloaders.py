"""The two functions that give a pair of DataLoaders."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

import penstock
from penstock.errors import PlanError, SourceError
from penstock.integrations.pytorch import (
    EpochShuffle,
    TextDataset,
    TransformerDataset,
    check_dataloader,
    create_dataloaders,
    create_text_dataloaders,
    test_dataloader,
)
from penstock.loader import dataloader

TEXT = "".join(f"Line {number}: the quick brown fox jumps.\n\n" for number in range(60))


@pytest.fixture
def files(write):
    train = write("train.txt", TEXT)
    return train, write("val.txt", TEXT[:900])


def rows(loader):
    """Every batch of an epoch as lists."""
    return [batch["input_ids"].tolist() for batch in loader]


def test_the_usage_loop_of_the_document_runs(write, letters):
    num_epochs, device = 2, torch.device("cpu")
    tokenizer = letters
    train_loader, val_loader = create_dataloaders(
        train_path=str(write("train.jsonl", [TEXT, TEXT])),
        val_path=str(write("validation.jsonl", [TEXT[:300]])),
        tokenizer=tokenizer,
        batch_size=16,
        seq_length=128,
        num_workers=1,
    )
    shapes = set()
    for _ in range(num_epochs):
        for batch in train_loader:
            inputs = batch["input_ids"].to(device)
            labels = batch["labels"].to(device)
            shapes.add((type(batch), tuple(inputs.shape), tuple(labels.shape)))

    assert shapes == {(dict, (16, 128), (16, 128))}
    assert len(train_loader) == (2 * len(TEXT) - 128) // 16
    assert sum(len(batch["labels"]) for batch in val_loader) == 300 - 128


def test_the_test_function_of_the_document_prints_its_lines(files, capsys):
    train_loader, _ = create_dataloaders(*files, "gpt2", batch_size=4, seq_length=8)
    test_dataloader(train_loader)
    lines = capsys.readouterr().out.splitlines()

    assert lines[:5] == [
        f"DataLoader has {len(train_loader)} batches",
        "Batch 0:",
        "  Input shape: torch.Size([4, 8])",
        "  Label shape: torch.Size([4, 8])",
        "  Input and label alignment check: True",
    ]
    assert [line for line in lines if line.startswith("Batch")] == [f"Batch {n}:" for n in range(3)]
    assert not test_dataloader.__test__


def test_sections_5_and_6_of_the_notes_as_code(files):
    """`TextDataset` wrapped by hand, as `train_gpt2.py` does."""
    train, val = (TextDataset(str(path), sequence_length=64) for path in files)
    assert len(train) == len(train.tokens) - train.sequence_length
    x, y = train[10]
    assert torch.equal(x, train.tokens[10 : 10 + 64])
    assert torch.equal(y, train.tokens[11 : 10 + 64 + 1])

    train_loader = DataLoader(train, batch_size=32, shuffle=True, num_workers=0)
    val_loader = DataLoader(val, batch_size=32)
    for loader in (train_loader, val_loader):
        inputs, targets = next(iter(loader))
        assert inputs.shape == targets.shape == (32, 64)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert check_dataloader(loader) == "shifted"


def test_they_are_real_dataloaders_with_the_settings_of_the_documents(files):
    train, val = create_dataloaders(*files, "gpt2", seq_length=16)
    text_train, text_val = create_text_dataloaders(*files)

    for loader, size in ((train, 16), (val, 16), (text_train, 32), (text_val, 32)):
        assert type(loader) is DataLoader
        assert loader.batch_size == size
        assert loader.num_workers == 0
        assert loader.pin_memory == torch.cuda.is_available()
        assert not loader.persistent_workers
        assert not isinstance(loader.sampler, RandomSampler)
    assert (train.drop_last, val.drop_last) == (True, False)
    assert isinstance(val.sampler, SequentialSampler)
    assert isinstance(train.dataset, TransformerDataset)
    assert text_train.dataset.sequence_length == 256


def test_training_gives_every_window_but_the_ragged_end_and_validation_all(files):
    train, val = create_dataloaders(*files, "gpt2", batch_size=6, seq_length=8)
    seen = [tuple(row) for batch in rows(train) for row in batch]
    expected = [tuple(item["input_ids"].tolist()) for item in train.dataset]

    assert len(seen) == len(train) * 6 == len(train.dataset) // 6 * 6
    assert len(train.dataset) % 6
    assert set(seen) <= set(expected)
    assert seen != expected[: len(seen)]
    in_order = [row for batch in rows(val) for row in batch]
    assert in_order == [item["input_ids"].tolist() for item in val.dataset]


def test_each_epoch_has_an_order_of_its_own_that_depends_on_the_seed(files):
    def orders(seed):
        train, _ = create_dataloaders(*files, "gpt2", seq_length=8, seed=seed)
        return [rows(train) for _ in range(2)]

    first, second = orders(17)
    assert first != second
    assert orders(17) == [first, second]
    assert orders(18)[0] != first


def test_a_run_goes_on_with_the_epoch_it_was_in(files):
    train, _ = create_dataloaders(*files, "gpt2", seq_length=8)
    epochs = [rows(train) for _ in range(3)]
    again, _ = create_dataloaders(*files, "gpt2", seq_length=8)
    again.sampler.set_epoch(2)

    assert rows(again) == epochs[2]
    with pytest.raises(PlanError, match="epoch=-1 must be 0 or more"):
        again.sampler.set_epoch(-1)


def test_the_order_is_that_of_the_loader(files):
    """Whoever moves on to `penstock.Loader` keeps the order of the data."""
    train, _ = create_dataloaders(*files, "gpt2", batch_size=4, seq_length=8, seed=3)
    windows = penstock.Windows(train.dataset._store, 8, stride=1)
    loader = penstock.Loader(windows, batch_size=4, seed=3)
    theirs = [batch["inputs"].tolist() for batch, _ in zip(loader, range(20), strict=False)]

    assert rows(train)[:20] == theirs


def test_loading_does_not_touch_the_generators_of_torch(files):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for loader in create_dataloaders(*files, "gpt2", seq_length=8):
        next(iter(loader))

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["fork", pytest.param("spawn", marks=pytest.mark.torture), "forkserver"]
)
def test_batches_are_the_same_with_workers_however_they_start(method, files, letters):
    letters.unpicklable = lambda: None

    def epochs(num_workers, **options):
        loaders = create_dataloaders(*files, letters, 4, 16, num_workers, stride=8, **options)
        assert all(loader.num_workers == num_workers for loader in loaders)
        assert all(loader.persistent_workers == bool(num_workers) for loader in loaders)
        return [rows(loader) for loader in loaders for _ in range(2)]

    options = {"multiprocessing_context": method, "prefetch_factor": 3}
    assert epochs(2, **options) == epochs(0)


def test_workers_give_pairs_too(files):
    plain, _ = create_text_dataloaders(*files, 4, 16)
    worked, _ = create_text_dataloaders(*files, 4, 16, num_workers=2)

    for (x, y), (again_x, again_y) in zip(plain, worked, strict=True):
        assert torch.equal(x, again_x)
        assert torch.equal(y, again_y)


def test_windows_has_no_workers_and_says_so_once(files, monkeypatch):
    monkeypatch.setattr(dataloader, "os", SimpleNamespace(name="nt"))
    asked = {"num_workers": 3, "prefetch_factor": 2, "multiprocessing_context": "spawn"}
    with pytest.warns(UserWarning, match="num_workers=3 is taken as 0 on Windows") as told:
        loaders = create_dataloaders(*files, "gpt2", 4, 8, **asked)

    assert [each.filename for each in told] == [__file__]
    for loader in loaders:
        assert (loader.num_workers, loader.prefetch_factor) == (0, None)
        assert not loader.persistent_workers


@pytest.mark.parametrize("make", [create_dataloaders, create_text_dataloaders])
def test_what_only_workers_can_do_is_refused_without_them(files, make):
    rest = {"tokenizer": "gpt2", "prefetch_factor": 2}
    with pytest.raises(ValueError, match=r"not valid with num_workers=0\. .* Set num_workers=1"):
        make(*files, batch_size=4, **rest)


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json"])
def test_the_format_goes_by_the_suffix_and_can_be_forced(suffix, write, letters):
    lines = write(f"a.{suffix}", ["abcdefghijkl"])
    text = write("b.txt", "abcdefghijkl")
    odd = write("c.data", "abcdefghijkl")

    train, val = create_dataloaders(lines, text, letters, 2, 4)
    assert (train.dataset.is_jsonl, val.dataset.is_jsonl) == (True, False)
    assert rows(val)[0][0] == [97, 98, 99, 100]
    with pytest.warns(UserWarning, match="as plain text, with the syntax"):
        train, val = create_dataloaders(lines, lines, letters, 2, 4, is_jsonl=False)
    assert not train.dataset.is_jsonl
    assert rows(val)[0][0] == [ord(letter) for letter in '{"te']
    with pytest.raises(SourceError, match=r"c.data ends in '\.data'; \.jsonl"):
        create_dataloaders(odd, odd, letters, 2, 4)
    assert create_dataloaders(odd, odd, letters, 2, 4, is_jsonl=False)


def test_too_little_text_is_an_error_with_the_numbers(write, letters):
    long, short = write("long.txt", "x" * 100), write("short.txt", "x" * 20)

    with pytest.raises(
        PlanError, match=r"short.txt has 20 tokens, and one window of 20 .*takes 21"
    ):
        create_dataloaders(short, long, letters, 1, 20)
    with pytest.raises(
        PlanError, match=r"short.txt has 20 tokens, and one window of 32 .*takes 33"
    ):
        create_dataloaders(long, short, letters, 1, 32)
    message = (
        r"short.txt has 20 tokens, which make 4 windows of 16, 1 apart; one batch of training "
        r"takes 5\."
    )
    with pytest.raises(PlanError, match=message):
        create_dataloaders(short, long, letters, 5, 16)
    with pytest.raises(PlanError, match="one window of 256"):
        create_text_dataloaders(long, short, tokenizer=letters)
    train, val = create_dataloaders(short, short, letters, 4, 16)
    assert (len(train), len(val)) == (1, 1)
    train, val = create_dataloaders(long, short, letters, 8, 16)
    assert [len(batch["labels"]) for batch in val] == [4]


def test_settings_reach_both_datasets(files):
    for make in (create_dataloaders, create_text_dataloaders):
        named = {"tokenizer": "gpt2"} if make is create_dataloaders else {}
        length = {"seq_length" if named else "sequence_length": 8}
        loaders = make(
            *files, **named, **length, batch_size=3, stride=8, labels="same", eos=True,
            pin_memory=False,
        )  # fmt: skip
        for loader in loaders:
            assert check_dataloader(loader, labels="same", vocab_size=50_257) == "same"
            assert loader.dataset.stride == 8
            assert loader.dataset.tokenized_data[-1] == 50_256
            assert loader.pin_memory is False


def test_one_tokenizer_serves_both_files(files, letters):
    train, val = create_dataloaders(*files, letters, 2, 8)

    assert train.dataset.tokenizer is val.dataset.tokenizer is letters
    assert letters.calls == len(train.dataset.samples) + len(val.dataset.samples)


def test_no_warning_is_given(files):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loader in create_dataloaders(*files, "gpt2", seq_length=8, num_workers=1):
            assert next(iter(loader))


def test_an_epoch_is_a_permutation_at_any_size():
    for size in (0, 1, 255, 256, 257, 5_000, 40_000):
        order = EpochShuffle(size, seed=1)
        assert len(order) == size
        assert sorted(order) == list(range(size))


def test_the_order_of_a_hundred_million_windows_takes_no_memory(quick_python):
    """A stored permutation would take 800 MB."""
    code = """
import resource
from penstock.integrations.pytorch import EpochShuffle
next(iter(EpochShuffle(1000)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
first = next(iter(EpochShuffle(10**8, seed=1)))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""

    assert float(quick_python(code).stdout) < 20


def test_ranks_share_out_what_one_process_reads(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"word {number} " for number in range(400)))

    def rows(**options):
        training, validation = create_text_dataloaders(
            text, text, 4, 16, tokenizer="bytes", stride=8, cache_dir=tmp_path, **options
        )
        windows = [x[(y != -100).all(1)] for x, y in validation]  # without those that fill up
        return [x for x, _ in training], torch.cat(windows)

    ranks = [rows(rank=rank, world_size=2) for rank in (0, 1)]
    one = create_text_dataloaders(
        text, text, 8, 16, tokenizer="bytes", stride=8, cache_dir=tmp_path
    )[0]

    together = [torch.cat(pair) for pair in zip(ranks[0][0], ranks[1][0], strict=True)]
    assert torch.equal(torch.stack(together), torch.stack([x for x, _ in one]))
    whole = rows()[1]
    assert torch.equal(ranks[0][1], whole[::2])
    assert torch.equal(ranks[1][1], whole[1::2])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("size", [1, 7, 5_000])
def test_no_window_is_read_by_two_ranks(size, world_size):
    orders = [
        EpochShuffle(size, seed=3, rank=rank, world_size=world_size, batch_size=2)
        for rank in range(world_size)
    ]
    found = [list(order) for order in orders]

    assert len({len(each) for each in found}) == 1
    assert [len(order) for order in orders] == [len(each) for each in found]
    everything = [number for each in found for number in each]
    assert len(set(everything)) == len(everything) > size - 2 * world_size
