"""Files of remote stores: downloaded before the steps that need them.

    step        │ now │                                     │ cursor
    parts used  │ 7 2 9 4 │ 7 2 9 4 │ … │ 1 5 8 3 │ …
                                            ahead: asked for, and not used yet

The plan says which rows come next, and the rows say which files they need. After each block of
steps, the files of later steps are asked for, until those that were asked for and are not used yet
have `_AHEAD_BYTES`. Background threads download them (`penstock.remote.downloads`). With blocks of
whole parts, these are the parts of the next group. If a step needs a file that is not here yet, its
thread waits.
"""

from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from penstock.loader.run import Run
from penstock.order.steps import PADDING, Shard
from penstock.ranges import group_rows
from penstock.rows.protocol import Integers, Rows
from penstock.streaming.waits import pause

if TYPE_CHECKING:
    from penstock.remote.downloads import MissingFile

# At 1 GB/s, a quarter of a second. Twice this and the parts of a group are needed on the disk.
_AHEAD_BYTES = 256 << 20
# Rows that are located at once, and how often for one block: the arithmetic of a block of steps
# must not wait long for that of later steps.
_ROWS_AT_ONCE = 8_192
_LOOKS = 4
_POLL_SECONDS = 0.005
# A file may be removed again before it is used, if the limit of the disk is too small.
_ATTEMPTS = 3


class PartsAhead:
    """The files of remote stores that a rank needs next.

    Args:
        rows: The rows of each source.
    """

    def __init__(self, rows: list[Rows]) -> None:
        self._rows = rows
        self.is_needed = any(each.is_remote for each in rows)
        """Whether a source is remote."""
        self._shard: Shard | None = None
        self._cursor = 0  # the step up to which files were asked for
        self._asked: deque[tuple[int, int]] = deque()  # the first step, and the bytes, of a file

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_shard": None, "_asked": deque()}

    def wait_for(self, located: Integers) -> None:
        """Wait until the files of located rows are here.

        Raises:
            RemoteError: a file could not be downloaded.
        """
        from penstock.remote.downloads import begin_download

        for _ in range(_ATTEMPTS):
            missing = self._missing(located)
            # All at once: they are downloaded in parallel.
            downloads = [begin_download(each, is_urgent=True) for each in missing]
            for each in downloads:
                _wait(each)
            if not missing:
                return

    def ask_ahead(self, run: Run, step: int, last_step: int) -> None:
        """Ask for files of the steps of `run` from `step` on; return without waiting."""
        from penstock.remote.downloads import begin_download

        shard = run.shard
        if shard is not self._shard or not self._cursor >= step:
            self._shard, self._cursor = shard, step
            self._asked.clear()
        while self._asked and self._asked[0][0] < step:
            self._asked.popleft()
        for _ in range(_LOOKS):
            if sum(size for _, size in self._asked) >= _AHEAD_BYTES or self._cursor >= last_step:
                return
            rows = max(1, int(shard.rows(self._cursor, self._cursor + 1)[0]))
            stop = min(last_step, self._cursor + max(1, _ROWS_AT_ONCE // rows))
            positions = shard.positions(self._cursor, stop, end=run.end)
            located = np.stack(run.plan.locate(positions[positions != PADDING]))
            for each in self._missing(located):
                if sum(size for _, size in self._asked) < _AHEAD_BYTES:
                    begin_download(each, is_urgent=False)
                    self._asked.append((self._cursor, each.file.size))
            self._cursor = stop

    def _missing(self, located: Integers) -> "list[MissingFile]":
        """The files that located rows need and that are not here."""
        found: list[MissingFile] = []
        for number, chosen in group_rows(located[0]):
            if self._rows[number].is_remote:
                found += self._rows[number].missing_files(located[2, chosen])
        return found


def _wait(download: "Future[bool]") -> None:
    """Wait for a download; a fork, or the end of the reader, need not wait for it."""
    while not download.done():
        pause(_POLL_SECONDS)
    download.result()  # raises its error
