"""Rank and world size come from torch.distributed wherever they are not given."""

import pytest
import torch

from penstock import Loader, Texts, Windows, build, stream
from penstock.errors import PlanError
from penstock.integrations.multiplex import create_multiplex_dataloader
from penstock.integrations.pytorch import EpochShuffle, create_dataloaders, create_text_dataloaders
from penstock.integrations.sft import SFTBatches, sft_data_generator

pytest.importorskip("lightning", reason="needs penstock[lightning]")

from penstock.integrations.huggingface import RowItems, StepLoader
from penstock.integrations.lightning import LLMDataModule, LocalOpenWebTextDataModule

TEXT = "".join(f"Line {number}: the quick brown fox jumps.\n\n" for number in range(60))
EXAMPLES = [{"n": number} for number in range(22)]


@pytest.fixture
def group(monkeypatch):
    """Makes this process rank 1 of 2, as after torch.distributed.init_process_group."""

    def join():
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    return join


@pytest.fixture
def files(write, tmp_path):
    write("text.txt", TEXT)
    build(Texts(TEXT.split("\n\n")), tmp_path / "store", tokenizer="bytes")
    return tmp_path


def render(row):
    return [row["n"], 1], [True, True]


def streamed(files, **ranks):
    with stream(files / "text.txt", files / "streamed", tokenizer="bytes") as store:
        yield from Loader(Windows(store, 16), 4, epochs=1, **ranks)


# Each gives the batches of one epoch, or of a few steps, from a directory of files and ranks.
APIS = {
    "Loader": lambda files, **ranks: Loader(Windows(files / "store", 16), 4, epochs=1, **ranks),
    "as_dataloader": lambda files, **ranks: Loader(
        Windows(files / "store", 16), 4, epochs=1, **ranks
    ).as_dataloader(),
    "stream": streamed,
    "StepLoader": lambda files, **ranks: StepLoader(Windows(files / "store", 16), 4, **ranks),
    "EpochShuffle": lambda files, **ranks: EpochShuffle(33, seed=5, batch_size=4, **ranks),
    "create_dataloaders": lambda files, **ranks: [
        batch
        for loader in create_dataloaders(
            files / "text.txt", files / "text.txt", "bytes", 4, 16, stride=9, **ranks
        )
        for batch in loader
    ],
    "create_text_dataloaders": lambda files, **ranks: [
        batch
        for loader in create_text_dataloaders(
            files / "text.txt", files / "text.txt", 4, 16, tokenizer="bytes", stride=9, **ranks
        )
        for batch in loader
    ],
    "multiplex": lambda files, **ranks: create_multiplex_dataloader(
        [("some", EXAMPLES)], 4, **ranks
    ),
    "SFTBatches": lambda files, **ranks: zip(
        range(5), SFTBatches(EXAMPLES, 4, render, pad_token_id=0, **ranks), strict=False
    ),
    "sft_data_generator": lambda files, **ranks: zip(
        range(5), sft_data_generator(EXAMPLES, 4, render, pad_token_id=0, **ranks), strict=False
    ),
}


def plain(value):
    """A batch as lists, which can be compared."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", APIS)
def test_rank_and_world_size_come_from_torch_distributed_in_every_api(name, files, group):
    batches = APIS[name]
    alone = plain(list(batches(files)))
    given = plain(list(batches(files, rank=1, world_size=2)))
    group()

    assert plain(list(batches(files))) == given != alone
    assert plain(list(batches(files, rank=0, world_size=1))) == alone


@pytest.mark.parametrize("name", APIS)
def test_one_of_rank_and_world_size_alone_and_a_rank_that_is_none_are_refused_alike(name, files):
    batches = APIS[name]
    with pytest.raises(PlanError, match="rank=0 and world_size=None: give both or neither"):
        list(batches(files, rank=0))
    with pytest.raises(PlanError, match="rank=2 must be from 0 to 1: world_size is 2"):
        list(batches(files, rank=2, world_size=2))
    with pytest.raises(PlanError, match="world_size=0 must be at least 1"):
        list(batches(files, rank=0, world_size=0))
    with pytest.raises(PlanError, match=r"rank='1' is not a whole number\."):
        list(batches(files, rank="1", world_size=2))


@pytest.mark.parametrize("side", ["train", "val"])
def test_data_modules_without_a_trainer_ask_torch_distributed(files, group, side):
    text = str(files / "text.txt")

    def modules():
        yield LLMDataModule("bytes", 4, 16, num_workers=0, data={"train": text, "val": text})
        yield LocalOpenWebTextDataModule(
            text, text, max_length=16, batch_size=4, num_workers=0, tokenizer="bytes"
        )

    def batches(module):
        module.prepare_data()
        module.setup("fit")
        return plain(list(getattr(module, f"{side}_dataloader")()))

    alone = [batches(module) for module in modules()]
    group()
    shares = [batches(module) for module in modules()]

    for whole, share in zip(alone, shares, strict=True):
        assert 0 < len(share) <= len(whole) // 2 + 1
        assert share != whole


def test_items_that_a_trainer_shards_are_all_rows_on_every_rank(files, group):
    rows = Windows(files / "store", 16)
    alone = [each["input_ids"].tolist() for each in RowItems(rows)]
    group()

    assert [each["input_ids"].tolist() for each in RowItems(rows)] == alone
