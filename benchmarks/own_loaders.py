"""The loaders that belong to token formats without a package of their own in `peers.py`.

    Loader(folder)     imports the packages, and opens the files that `formats.py` wrote
    batches()          yields `(inputs, targets)`, int64, (32, 1024); of some, without end

Megatron's, datatrove's and OLMo's are the classes of megatron-core, datatrove and ai2-olmo-core,
with the `DataLoader` of torch. nanoGPT and llm.c have no package: their loops are written here from
their documentation. Those of datatrove, llm.c and modded-nanogpt read in order, because their files
are shuffled when they are written; the others shuffle.
"""

import logging
import warnings
from types import SimpleNamespace

import numpy as np
import torch
from peers import BATCH, LENGTH, ROW, SEED, pair
from torch.utils.data import DataLoader

HEADER = 1024  # bytes, of llm.c
MAGIC = 20240520


class NanoGpt:
    """`get_batch`: rows at random offsets of a file that is mapped again for each batch."""

    def __init__(self, folder):
        self._path = folder / "nanogpt.bin"

    def batches(self):
        while True:
            data = np.memmap(self._path, dtype=np.uint16, mode="r")
            starts = torch.randint(len(data) - LENGTH, (BATCH,))
            yield tuple(
                torch.stack(
                    [
                        torch.from_numpy(data[i + shift : i + shift + LENGTH].astype(np.int64))
                        for i in starts
                    ]
                )
                for shift in (0, 1)
            )


def load_shard(path):
    """The ids of a file of llm.c, in memory, after its header was checked."""
    with path.open("rb") as stream:
        header = np.frombuffer(stream.read(HEADER), "<i4")
        ids = np.frombuffer(stream.read(), "<u2")
    if header[0] != MAGIC or header[1] != 1 or header[2] != len(ids):
        raise ValueError(f"{path} is not a file of llm.c")
    return ids


class LlmC:
    """`DistributedDataLoader` of llm.c's train_gpt2.py: consecutive rows of a file in memory."""

    def __init__(self, folder):
        self._ids = load_shard(folder / "llmc.bin")

    def batches(self):
        step = BATCH * LENGTH
        for at in range(0, len(self._ids) - step, step):
            block = torch.tensor(self._ids[at : at + step + 1].astype(np.int32), dtype=torch.long)
            yield block[:-1].view(BATCH, LENGTH), block[1:].view(BATCH, LENGTH)


class Modded:
    """`distributed_data_generator` of modded-nanogpt: the same, from a tensor of uint16."""

    def __init__(self, folder):
        self._ids = torch.from_numpy(load_shard(folder / "llmc.bin").copy())

    def batches(self):
        step = BATCH * LENGTH
        for at in range(0, len(self._ids) - step, step):
            block = self._ids[at : at + step + 1]
            # It sends int32 inputs and int64 targets to a GPU; here both are int64, as elsewhere.
            inputs, targets = block[:-1].to(torch.int64), block[1:].to(torch.int64)
            yield inputs.view(BATCH, LENGTH), targets.view(BATCH, LENGTH)


class Megatron:
    """`GPTDataset` over an `IndexedDataset`: samples of a shuffled index that it builds first."""

    def __init__(self, folder):
        logging.getLogger("megatron").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
            from megatron.core.datasets.indexed_dataset import IndexedDataset
            from megatron.core.datasets.utils import Split, compile_helpers
        try:
            from megatron.core.datasets import helpers_cpp  # noqa: F401
        except ImportError:
            compile_helpers()  # of the source package; wheels have it
        # What it asks of a tokenizer.
        tokenizer = SimpleNamespace(
            vocab_size=50257, eod=50256, pad=50256, unique_identifiers={"name": "benchmark"}
        )
        config = GPTDatasetConfig(
            random_seed=SEED,
            sequence_length=LENGTH,
            blend=([str(folder / "documents")], None),
            split="1",
            path_to_cache=str(folder / "megatron-cache"),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        indexed = IndexedDataset(str(folder / "documents"))
        numbers = np.arange(len(indexed), dtype=np.int32)
        dataset = GPTDataset(indexed, str(folder / "documents"), numbers, None, Split.train, config)
        self._opened = DataLoader(dataset, batch_size=BATCH, drop_last=True)

    def batches(self):
        for batch in self._opened:
            yield batch["tokens"], batch["labels"]


class Datatrove:
    """`DatatroveFolderDataset`, in order; its documentation says that random rows are slow."""

    def __init__(self, folder):
        from datatrove.utils.dataset import DatatroveFolderDataset

        dataset = DatatroveFolderDataset(str(folder / "datatrove"), LENGTH, "*.ds")
        self._opened = DataLoader(dataset, batch_size=BATCH, drop_last=True)

    def batches(self):
        for batch in self._opened:
            yield pair(batch["input_ids"])


class Olmo:
    """`NumpyFSLDataset`: rows of one array, shuffled by a sampler."""

    def __init__(self, folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from olmo_core.data import NumpyFSLDatasetConfig, TokenizerConfig
        config = NumpyFSLDatasetConfig(
            paths=[str(folder / "olmo.npy")],
            sequence_length=ROW,
            tokenizer=TokenizerConfig(vocab_size=50257, eos_token_id=50256, pad_token_id=50256),
            work_dir=str(folder / "olmo-work"),
        )
        dataset = config.build()
        dataset.prepare()
        self._opened = DataLoader(
            dataset,
            batch_size=BATCH,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(SEED),
            collate_fn=lambda rows: torch.stack([row["input_ids"] for row in rows]),
        )

    def batches(self):
        for rows in self._opened:
            yield pair(rows.long())


OWN_LOADERS = {
    "nanoGPT": (NanoGpt, "nanoGPT's get_batch"),
    "llm.c": (LlmC, "llm.c's DistributedDataLoader, in order"),
    "llm.c, modded": (Modded, "modded-nanogpt's generator, in order"),
    "Megatron": (Megatron, "Megatron's GPTDataset"),
    "datatrove": (Datatrove, "datatrove's DatatroveFolderDataset, in order"),
    "OLMo": (Olmo, "OLMo-core's NumpyFSLDataset"),
}
