"""What a build keeps of an earlier run that was killed: the slices whose files are intact."""

import logging
from concurrent.futures import ThreadPoolExecutor

from penstock.store.job import Job
from penstock.store.journal import Journal, SealedSlice
from penstock.store.manifest import part_file
from penstock.store.verify import file_problem

_log = logging.getLogger("penstock")


def intact_slices(job: Job, journal: Journal, sealed: list[SealedSlice]) -> list[SealedSlice]:
    """The sealed slices whose files have the recorded contents; the others are made again.

    A record is written after its files were synced. So a file with other contents was changed by
    somebody, or the disk does not return what was written to it. All bytes are read, and hashed on
    as many threads as the build has: a file that was damaged here would become part of the store.
    """

    def is_intact(record: SealedSlice) -> bool:
        for side, part in record.parts.items():
            for kind, recorded in part.files.items():
                path = job.directory / side / part_file(part.number, kind)
                if problem := file_problem(path, *recorded, says="the journal"):
                    _log.warning("%s %s. Its slice is made again.", path, problem)
                    return False
        return True

    with ThreadPoolExecutor(job.num_threads) as threads:
        intact = list(threads.map(is_intact, sealed))
    for record, is_kept in zip(sealed, intact, strict=True):
        if not is_kept:
            journal.forget(record.number)  # a reader of a live build must not take it
    return [record for record, is_kept in zip(sealed, intact, strict=True) if is_kept]
