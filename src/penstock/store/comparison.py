"""The comparisons with the reference tokenizer that a build makes.

The first documents that any worker reads are compared before anything is sealed, and a sample
of every slice when the slice is sealed. Where parts are read while others are made, both wait
until the first part can be read: loading the reference takes as long as making that part.
"""

import threading

from penstock.sources.document import Batch
from penstock.store.job import Job
from penstock.tokenize.oracle import SliceSample, compare

__all__ = ["Comparison"]


class Comparison:
    """What workers of one build share about their comparisons."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._begun = False
        self._first: Batch | None = None
        self._names = [file.name for file in job.files]
        self._samples: dict[int, SliceSample] = {}

    def see(self, index: int, batch: Batch) -> None:
        """Take the next batch of a slice; each slice is read by one worker, in order."""
        with self._lock:
            is_first = not self._begun and len(batch) > 0
            self._begun |= is_first
            sample = self._samples.get(index)
            if sample is None:
                sample = SliceSample(self._job.tokenizer, index, self._names, self._job.first_file)
                self._samples[index] = sample
        sample.add(batch)
        if is_first and self._job.live:
            self._first = batch
        elif is_first:
            self._compare_first(batch)

    def settle(self, index: int) -> None:
        """Compare what was put off, and the sample of a slice.

        Raises:
            TokenMismatchError: an id differs.
        """
        with self._lock:
            first, self._first = self._first, None
            sample = self._samples.pop(index, None)
        if first is not None:
            self._compare_first(first)
        if sample is not None:
            sample.compare()

    def _compare_first(self, batch: Batch) -> None:
        compare(self._job.tokenizer, batch.texts)
        if self._job.chat is not None:
            self._job.chat.compare(batch)
