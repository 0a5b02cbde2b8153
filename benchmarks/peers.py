"""Every loader that `loader.py` measures, with the same small interface.

    Case(folder)          imports the packages of the case
    prepare(tokens)       writes the tokens in the format of the case, once
    open(**choice)        opens the case with one of the settings in `choices`
    batches()             yields shuffled `(inputs, targets)`, int64, (32, 1024)
    state(), restore()    save and resume; missing if the peer cannot do that

Peers are configured as in their documentation, with prepared rows of 1,025 tokens and the fastest
conversion to int64 that we found. All of them shuffle: the whole epoch, or as much as they can
(LitData within and between chunks, MosaicML within blocks, HF's iterable within a buffer).
"""

import importlib.machinery
import logging
import sys
import types
from functools import partial
from pathlib import Path

import numpy as np
import torch
from stores import write_store
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

LENGTH = 1024
ROW = LENGTH + 1
BATCH = 32
SEED = 17
_PART_TOKENS = 14_000_000  # the tokens of 64 MB of English text, as in a part of a real store
_NUM_PIECES = 64


def pair(rows):
    """Inputs and targets: two views of rows with 1,025 ids."""
    return rows[:, :-1], rows[:, 1:]


def widened(rows):
    """Inputs and targets of uint16 NumPy rows, as int64."""
    return pair(torch.from_numpy(rows.astype(np.int64)))


class Case:
    """The base class of all cases."""

    package = None
    """The package that must be installed; None if there is none."""
    data = "array"
    """The directory with the tokens in the format of this case."""
    choices = ({},)

    def __init__(self, folder):
        self.folder = folder / self.data
        self.array = folder / "array" / "tokens.npy"
        # A batch is so small that several torch threads would mostly wait for each other.
        torch.set_num_threads(1)

    def touch(self, batch):
        """Read one element of the batch."""
        return batch[0][0, 0].item()

    def check(self, batch):
        """Raise an error if the batch does not have the required form."""
        inputs, targets = batch
        assert inputs.shape == targets.shape == (BATCH, LENGTH), inputs.shape
        assert inputs.dtype == targets.dtype == torch.int64, inputs.dtype
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


class Penstock(Case):
    """The loader with its defaults, or without its prefetch thread if that is faster."""

    data = "store"
    choices = ({"prefetch": 2}, {"prefetch": 0})

    def __init__(self, folder):
        super().__init__(folder)
        import penstock.loader.loader
        import penstock.rows.windows

        self.rows, self.loader = penstock.rows.windows.Windows, penstock.loader.loader.Loader

    def prepare(self, tokens):
        num_parts = max(1, round(len(tokens) / _PART_TOKENS))
        write_store(self.folder, np.array_split(tokens, num_parts))

    def open(self, **choice):
        rows = self.rows(self.folder, LENGTH)
        self.opened = self.loader(rows, BATCH, seed=SEED, format="tuple", **choice)

    def batches(self):
        return iter(self.opened)

    def state(self):
        return self.opened.state_dict()

    def restore(self, state):
        self.opened.load_state_dict(state)


class PenstockNarrow(Penstock):
    """Ids in the stored dtype, without a prefetch thread."""

    choices = ({"format": "narrow", "prefetch": 0},)

    def open(self, **choice):
        self.opened = self.loader(self.rows(self.folder, LENGTH), BATCH, seed=SEED, **choice)

    def touch(self, batch):
        return batch["tokens"][0, 0].item()

    def check(self, batch):
        assert batch["tokens"].shape == (BATCH, ROW)
        assert batch["tokens"].dtype == torch.uint16


class NumpyGather(Case):
    """The rows of the narrow loader with one NumPy indexing call per batch: the upper limit."""

    def open(self):
        self.tokens = np.asarray(np.load(self.array, mmap_mode="r"))
        self.windows = np.lib.stride_tricks.sliding_window_view(self.tokens, ROW)
        num_rows = (len(self.tokens) - 1) // LENGTH
        order = np.random.default_rng(SEED).permutation(num_rows)
        self.starts = order[: num_rows // BATCH * BATCH].reshape(-1, BATCH) * LENGTH

    def batches(self):
        while True:
            for starts in self.starts:
                yield self.windows[starts]

    def touch(self, batch):
        return batch[0, 0].item()

    def check(self, batch):
        assert batch.shape == (BATCH, ROW)
        assert batch.dtype == np.uint16


class PenstockParts(Penstock):
    """One source of 64 parts."""

    data = "parts"
    choices = ({"prefetch": 2},)

    def prepare(self, tokens):
        write_store(self.folder, np.array_split(tokens, _NUM_PIECES))


class PenstockSources(Penstock):
    """64 sources of one part each, every row once per epoch."""

    data = "sources"
    choices = ({"prefetch": 2},)

    def __init__(self, folder):
        super().__init__(folder)
        import penstock.order.plan

        self.plan = penstock.order.plan.Plan

    def prepare(self, tokens):
        for number, piece in enumerate(np.array_split(tokens, _NUM_PIECES)):
            write_store(self.folder / f"{number:02d}", [piece])

    def open(self, **choice):
        paths = sorted(path for path in self.folder.iterdir() if path.is_dir())
        sources = {path.name: self.rows(path, LENGTH) for path in paths}
        plan = self.plan(sources, seed=SEED)
        self.opened = self.loader(plan, BATCH, format="tuple", **choice)


class LitData(Case):
    """`StreamingDataset` with `TokensLoader` over optimized, memory-mapped chunks."""

    package = "litdata"
    data = "litdata"
    choices = ({"num_workers": 0}, {"num_workers": 2})

    def __init__(self, folder):
        super().__init__(folder)
        import litdata

        self.litdata = litdata

    def prepare(self, tokens):
        size = ROW * 1_000
        self.litdata.optimize(
            partial(_piece, self.array, size),
            list(range(0, max(1, len(tokens) - ROW), size)),
            str(self.folder),
            chunk_size=ROW * 16_000,  # 16 M tokens, as in its documentation
            num_workers=1,
            item_loader=self.litdata.TokensLoader(),
            verbose=False,
        )

    def open(self, num_workers):
        rows = self.litdata.StreamingDataset(
            str(self.folder),
            item_loader=self.litdata.TokensLoader(block_size=ROW),
            shuffle=True,
            drop_last=True,
            seed=SEED,
        )
        self.opened = self.litdata.StreamingDataLoader(
            rows, batch_size=BATCH, num_workers=num_workers, collate_fn=_stacked, drop_last=True
        )

    def batches(self):
        return iter(self.opened)

    def state(self):
        return self.opened.state_dict()

    def restore(self, state):
        self.opened.load_state_dict(state)


def _piece(path, size, start):
    piece = np.load(path, mmap_mode="r")[start : start + size]
    return torch.from_numpy(piece[: len(piece) // ROW * ROW].copy())


def _stacked(rows):
    return widened(torch.stack(rows).numpy())


class Mosaic(Case):
    """`StreamingDataset` over MDS shards with ids as bytes, in the format of llm-foundry."""

    package = "streaming"
    data = "mds"
    choices = ({"num_workers": 0}, {"num_workers": 2})

    def __init__(self, folder):
        super().__init__(folder)
        # `import streaming` imports torchvision, whose wheels need a torch with CUDA. The package
        # `streaming.base` has the whole loader and does not. So import it without its parent; and
        # not from this directory, which has a benchmark of the same name.
        elsewhere = [each for each in sys.path if Path(each).resolve() != Path(__file__).parent]
        spec = importlib.machinery.PathFinder.find_spec("streaming", elsewhere)
        if spec is None:
            raise ModuleNotFoundError("No module named 'streaming'", name="streaming")
        package = types.ModuleType("streaming")
        package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
        sys.modules["streaming"] = package
        import streaming.base

        self.base = streaming.base

    def prepare(self, tokens):
        with self.base.MDSWriter(out=str(self.folder), columns={"tokens": "bytes"}) as writer:
            for row in _rows(tokens):
                writer.write({"tokens": row.tobytes()})

    def open(self, num_workers):
        rows = self.base.StreamingDataset(
            local=str(self.folder),
            batch_size=BATCH,
            shuffle=True,
            shuffle_seed=SEED,
            num_canonical_nodes=1,
        )
        self.opened = self.base.StreamingDataLoader(
            rows, batch_size=BATCH, num_workers=num_workers, collate_fn=_joined, drop_last=True
        )

    def batches(self):
        return iter(self.opened)

    def state(self):
        return self.opened.state_dict()

    def restore(self, state):
        self.opened.load_state_dict(state)


def _rows(tokens):
    num_rows = len(tokens) // ROW
    return tokens[: num_rows * ROW].reshape(num_rows, ROW)


def _joined(rows):
    return widened(np.frombuffer(b"".join([row["tokens"] for row in rows]), "<u2").reshape(-1, ROW))


class Grain(Case):
    """A `MapDataset` over a random-access source of memory-mapped ids."""

    package = "grain"
    choices = (
        {"num_threads": 0},
        {"num_threads": 2},
        {"num_threads": 16},
        {"num_threads": 0, "num_workers": 2},
    )

    def __init__(self, folder):
        super().__init__(folder)
        logging.getLogger("absl").setLevel(logging.ERROR)
        import grain

        self.grain = grain

    def open(self, num_threads, num_workers=0):
        grain = self.grain
        reading = grain.ReadOptions(
            num_threads=num_threads, prefetch_buffer_size=16 if num_threads else 0
        )
        rows = grain.MapDataset.source(MappedRows(self.array)).shuffle(seed=SEED).repeat()
        batches = rows.batch(BATCH, drop_remainder=True, batch_fn=_stacked_wide)
        self.opened = batches.to_iter_dataset(reading)
        if num_workers:
            self.opened = self.opened.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=16)
            )
        self.iterator = iter(self.opened)

    def batches(self):
        for rows in self.iterator:
            yield pair(torch.from_numpy(rows))

    def state(self):
        return self.iterator.get_state()

    def restore(self, state):
        self.iterator.set_state(state)


class MappedRows:
    """Rows of a mapped file, for Grain. Slicing a plain array is faster than a memmap."""

    def __init__(self, path):
        self._path = path
        self._tokens = np.asarray(np.load(path, mmap_mode="r"))

    def __len__(self):
        return (len(self._tokens) - 1) // LENGTH

    def __getitem__(self, number):
        return self._tokens[number * LENGTH : number * LENGTH + ROW]

    def __reduce__(self):
        return MappedRows, (self._path,)


def _stacked_wide(rows):
    return np.stack(rows).astype(np.int64)


class HubMap(Case):
    """A `datasets.Dataset` of rows; each call reads 32 random ones."""

    package = "datasets"
    data = "hf"
    choices = tuple(
        {"format": kind, "num_workers": number} for kind in ("numpy", "torch") for number in (0, 2)
    )

    def __init__(self, folder):
        super().__init__(folder)
        import datasets

        datasets.disable_progress_bars()
        self.datasets = datasets

    def prepare(self, tokens):
        import pyarrow as pa

        rows = _rows(tokens)
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), ROW)
        self.datasets.Dataset(pa.table({"tokens": column})).save_to_disk(self.folder)

    def open(self, format, num_workers):
        rows = self.datasets.load_from_disk(self.folder).with_format(format)
        generator = torch.Generator().manual_seed(SEED)
        order = BatchSampler(RandomSampler(rows, generator=generator), BATCH, drop_last=True)
        self.opened = DataLoader(
            rows,
            sampler=order,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_CONVERSIONS[format],
        )

    def batches(self):
        return iter(self.opened)


class HubIterable(HubMap):
    """Its iterable form, shuffled in a buffer of 1,000 rows, as in its documentation."""

    choices = tuple({"format": kind} for kind in ("numpy", "torch"))

    def open(self, format):
        self.convert = _CONVERSIONS[format]
        rows = self.datasets.load_from_disk(self.folder).to_iterable_dataset(num_shards=8)
        self.opened = rows.shuffle(seed=SEED, buffer_size=1_000).with_format(format)

    def batches(self):
        for batch in self.opened.iter(batch_size=BATCH, drop_last_batch=True):
            yield self.convert(batch)

    def state(self):
        return self.opened.state_dict()

    def restore(self, state):
        self.opened.load_state_dict(state)


class HubArrow(HubIterable):
    """The same, with Arrow tables that are converted to tensors by hand."""

    choices = ({"format": "arrow"},)


def _from_arrow(table):
    column = table["tokens"].combine_chunks()
    return widened(column.flatten().to_numpy(zero_copy_only=True).reshape(-1, ROW))


_CONVERSIONS = {
    "numpy": lambda batch: widened(batch["tokens"]),
    "torch": lambda batch: pair(batch["tokens"].long()),
    "arrow": _from_arrow,
}


class NanoGpt(Case):
    """`get_batch` of nanoGPT: rows at random offsets of a mapped file, one by one.

    It draws with replacement from the global generator, so it cannot resume. The original maps
    the file again for every batch, to avoid a memory leak; the other setting maps it once.
    """

    choices = ({"remap": True}, {"remap": False})

    def open(self, remap):
        self.remap = remap
        self.mapped = self._map()

    def _map(self):
        # The ids begin after the header of the .npy file; a .bin file has none.
        size = self.array.stat().st_size
        offset = 128
        return np.memmap(self.array, np.uint16, "r", offset, ((size - offset) // 2,))

    def batches(self):
        while True:
            data = self._map() if self.remap else self.mapped
            starts = torch.randint(len(data) - LENGTH, (BATCH,))
            yield (
                torch.stack([self._row(data, start) for start in starts]),
                torch.stack([self._row(data, start + 1) for start in starts]),
            )

    def _row(self, data, start):
        return torch.from_numpy(data[start : start + LENGTH].astype(np.int64))


class TorchDataset(Case):
    """A map-style Dataset over all ids as one int64 tensor in memory, with a `DataLoader`."""

    choices = ({"num_workers": 0}, {"num_workers": 2})

    def open(self, num_workers):
        tokens = torch.from_numpy(np.load(self.array).astype(np.int64))
        self.opened = DataLoader(
            Slices(tokens),
            batch_size=BATCH,
            shuffle=True,
            drop_last=True,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(SEED),
        )

    def batches(self):
        return iter(self.opened)


class Slices(Dataset):
    """Inputs and targets as slices of a tensor."""

    def __init__(self, tokens):
        self._tokens = tokens

    def __len__(self):
        return (len(self._tokens) - 1) // LENGTH

    def __getitem__(self, number):
        start = number * LENGTH
        stop = start + LENGTH
        return self._tokens[start:stop], self._tokens[start + 1 : stop + 1]


CASES = {
    "penstock": Penstock,
    "LitData": LitData,
    "MosaicML Streaming": Mosaic,
    "Grain": Grain,
    "HF datasets": HubMap,
    "HF datasets, iterable": HubIterable,
    "HF datasets, Arrow by hand": HubArrow,
    "nanoGPT get_batch": NanoGpt,
    "torch Dataset in RAM": TorchDataset,
    "penstock, narrow": PenstockNarrow,
    "NumPy gather": NumpyGather,
    "penstock, 64 parts": PenstockParts,
    "penstock, 64 sources": PenstockSources,
}
