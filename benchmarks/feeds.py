"""Different ways to load batches to a GPU, each as an iterator of batches on the device.

store      windows of a finished store
mixture    four weighted sources, two of them with another stride
packed     whole documents, with a mask between documents
stream     a store that is built from text while it is read
DataLoader a map-style dataset over the tokens, with worker processes
get_batch  as in nanoGPT: random rows, which the training loop copies itself
ceiling    the same batch every time, which is on the device already
"""

import tempfile

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import penstock as ps
from penstock.loader.batch import DeviceCopy

__all__ = ["COPIED", "Ceiling", "Feeds"]

COPIED = {"bytes": 0}
_MOST_TOKENS = 200_000_000  # the most tokens that the peers keep in memory


def count_copies():
    """Count every byte that a penstock loader copies to the device."""
    original = DeviceCopy.put

    def put(self, arrays, *rest, **options):
        COPIED["bytes"] += sum(array.nbytes for array in arrays.values())
        return original(self, arrays, *rest, **options)

    DeviceCopy.put = put


class Ceiling:
    """An endless iterator of the same batch."""

    fingerprint = None

    def __init__(self, batch):
        self._batch = batch

    def __iter__(self):
        return self

    def __next__(self):
        return self._batch


class Rows(Dataset):
    """Rows of tokens as in a tutorial: two int64 tensors per item."""

    def __init__(self, tokens, length):
        self._tokens = tokens
        self._length = length

    def __len__(self):
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, number):
        start = number * self._length
        row = torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))
        return row[:-1], row[1:]


class Feeds:
    """All ways to load batches from one store, with one batch size."""

    def __init__(self, store, *, length, rows, text=None, workers=8, device="cuda"):
        self.store = ps.TokenStore(store)
        self.length, self.rows, self.device = length, rows, device
        self.text, self.workers = text, workers
        self._growing = self._folder = None

    def make(self, name):
        """A new iterator from the beginning; raises an error if it cannot be created."""
        makers = {
            "store": self._store,
            "mixture": self._mixture,
            "packed": self._packed,
            "stream": self._stream,
            "DataLoader": self._dataloader,
            "get_batch": self._get_batch,
        }
        return makers[name]()

    def end_stream(self):
        """Stop the build of a stream, if there is one; returns whether it was still running."""
        if self._growing is None:
            return False
        under_way = not self._growing.sealed
        self._growing.close()
        self._growing = None
        self._folder.cleanup()
        return under_way

    def loader(self, name):
        """A penstock loader, for its fingerprints."""
        return {"store": self._loader, "packed": self._packs_loader}[name]()

    def ceiling(self, name):
        """An iterator over one batch that is on the device already."""
        kind = "packed" if name == "packed" else "store"
        return Ceiling(next(iter(self.loader(kind))))

    def _windows(self, **how):
        return ps.Windows(self.store, self.length, **how)

    def _loader(self):
        return ps.Loader(self._windows(), self.rows, seed=5, device=self.device)

    def _store(self):
        return iter(self._loader())

    def _packs_loader(self):
        return ps.Loader(ps.Packs(self.store, self.length), self.rows, seed=5, device=self.device)

    def _packed(self):
        return iter(self._packs_loader())

    def _mixture(self):
        sources = {
            "whole": self._windows(),
            "half": self._windows(stride=self.length // 2),
            "packs": ps.Packs(self.store, self.length, borders=False),
            "quarter": self._windows(stride=self.length // 4),
        }
        weights = {"whole": 0.4, "half": 0.3, "packs": 0.2, "quarter": 0.1}
        plan = ps.Plan(sources, weights=weights, seed=5)
        return iter(ps.Loader(plan, self.rows, device=self.device))

    def _stream(self):
        if self.text is None:
            raise ValueError("streaming needs a text file: pass --text FILE")
        self.end_stream()
        folder = self._folder = tempfile.TemporaryDirectory()
        self._growing = ps.stream(self.text, f"{folder.name}/store", documents="lines")
        rows = ps.Windows(self._growing, self.length)
        return iter(ps.Loader(rows, self.rows, seed=5, shuffle="part", device=self.device))

    def _tokens(self):
        return np.asarray(self.store.tokens(0, min(self.store.num_tokens, _MOST_TOKENS)))

    def _dataloader(self):
        loader = DataLoader(
            Rows(self._tokens(), self.length),
            self.rows,
            shuffle=True,
            drop_last=True,
            num_workers=self.workers,
            pin_memory=self.device == "cuda",
            prefetch_factor=4 if self.workers else None,
        )

        def batches():
            while True:
                for inputs, targets in loader:
                    COPIED["bytes"] += inputs.nbytes + targets.nbytes
                    yield {
                        "inputs": inputs.to(self.device, non_blocking=True),
                        "targets": targets.to(self.device, non_blocking=True),
                    }

        return batches()

    def _get_batch(self):
        tokens, generator = self._tokens(), np.random.default_rng(5)

        def batches():
            while True:
                starts = generator.integers(len(tokens) - self.length - 1, size=self.rows)
                both = [
                    torch.stack(
                        [
                            torch.from_numpy(
                                tokens[start + shift : start + shift + self.length].astype(np.int64)
                            )
                            for start in starts
                        ]
                    )
                    for shift in (0, 1)
                ]
                COPIED["bytes"] += sum(each.nbytes for each in both)
                if self.device == "cuda":
                    both = [each.pin_memory() for each in both]
                inputs, targets = (each.to(self.device, non_blocking=True) for each in both)
                yield {"inputs": inputs, "targets": targets}

        return batches()
