"""Snapshots of a store that is being written.

    build in the background     part 0 │ part 1 │ part 2 │ …
    snapshots                   [0]      [0, 1]   [0, 1, 2]          ordinary stores

Everything that is known about the store comes from its directory: the journal has a record of
each sealed slice, and the manifest is written at the end. So any process can build, and a reader
that starts later finds the existing parts at once. Sealed parts never change, so a snapshot is an
ordinary store over a prefix of the parts, and rows over it are ordinary rows. Only the plan of a
loader (`penstock.streaming.plan`) replaces a snapshot by the next one.
"""

import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self, final, overload

import numpy as np

from penstock.digest import canonical_json
from penstock.disk import lock_holder
from penstock.errors import StoreBusyError, StoreError, UnknownLengthError
from penstock.rows.protocol import Array, Settings
from penstock.store.manifest import (
    FILE_NAME,
    Manifest,
    PartRecord,
    PartTable,
    read_manifest,
    shared_settings,
)
from penstock.store.reader import TokenStore
from penstock.store.verify import comparable, differences
from penstock.streaming.waits import StallTimer, pause

if TYPE_CHECKING:
    # Only for types: these modules import Arrow, which reading a store does not need.
    from penstock.store.job import BuildProgress
    from penstock.streaming.stream import Builder

# How often a waiting reader inspects the directory, which is a few file system calls.
_POLL_SECONDS = 0.004
# How often it asks the build to use all threads, which writes to the disk.
_ASK_SECONDS = 0.05


@final
class Snapshot(TokenStore):
    """A store over the parts of the stream `source` that were sealed when it was made.

    If `sealed`, the store is finished, and `manifest` is that of the finished store.
    """

    def __init__(self, source: "StreamedStore", manifest: Manifest, *, sealed: bool) -> None:
        super().__init__(source.path, manifest)
        self.source = source
        self.sealed = sealed
        self.files.read_in_order = True

    def __repr__(self) -> str:
        state = "sealed" if self.sealed else "so far"
        size = f"{len(self.manifest.parts):,} parts, {self.num_tokens:,} tokens"
        return f"Snapshot({str(self.path)!r}: {size} {state})"

    def __getstate__(self) -> Settings:
        return {"source": self.source, "manifest": self.manifest, "sealed": self.sealed}

    def __setstate__(self, state: Settings) -> None:
        self.__init__(state["source"], state["manifest"], sealed=state["sealed"])

    @property
    def digest(self) -> str:
        """The digest of the finished store."""
        return self.manifest.digest if self.sealed else self.source.digest


class StreamedStore:
    """The return value of `ps.stream`: a store that is being written.

    `snapshot()` returns an ordinary store over the parts that are sealed. Iteration over the
    documents waits for parts that are not sealed yet, at most `timeout` seconds from one sealed
    slice to the next. Safe to use from several threads. A forked or unpickled copy only reads.

    The build stops when the stream is closed, when its `with` block or the process ends, or when
    nothing refers to the stream any more. The same call of `ps.stream` continues it.
    """

    def __init__(
        self, path: Path, stamped: Settings, dtype: str, timeout: float, builder: "Builder | None"
    ) -> None:
        self.path = path
        self._stamped, self._dtype, self._timeout = stamped, dtype, timeout
        self._builder = builder
        # Imported here, because it imports Arrow; `stream` has done so already.
        from penstock.store.journal import Journal

        self._journal = Journal(path)
        # These change under the lock only, and a manifest is replaced as a whole. So `_manifest`
        # may be read without the lock: a reader sees the old one or the new one.
        self._is_ours = False  # whether the journal was read and belongs to this build
        self._num_slices = 0
        self._asked = -1.0  # when a waiting reader was last reported to the builder
        build = {key: stamped[key] for key in ("reading", "inputs")}
        contents = {"dtype": dtype, **shared_settings(stamped), "builds": [build]}
        self._manifest = Manifest("", contents, PartTable.of((), np.dtype(dtype).itemsize))
        self._sealed = False
        # Weak, because a snapshot refers to its stream: the build of a stream that nothing else
        # refers to must end at once, and not when the garbage collector finds the cycle.
        self._last: weakref.ref[Snapshot] | None = None
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, builder)
        _open_streams.add(self)

    def __repr__(self) -> str:
        return repr(self.snapshot()).replace("Snapshot", "StreamedStore", 1)

    def __getstate__(self) -> Settings:
        kept = {"path": self.path, "stamped": self._stamped, "dtype": self._dtype}
        return {**kept, "timeout": self._timeout, "builder": None}

    def __setstate__(self, state: Settings) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the build, if this process builds; sealed parts stay."""
        self._finalizer()

    def __len__(self) -> int:
        return self._finished("the number of documents").num_pieces

    def __iter__(self) -> Iterator[Array]:
        """Yield the tokens of each document, in order; wait for those that are not ready."""
        part = 0
        while self.await_parts(part + 1):
            yield from self.snapshot().part_documents(part)
            part += 1

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | list[Array]:
        """Return the tokens of one document; wait for it if it is not ready.

        Slices, and numbers that count from the end, need the finished store.
        """
        if isinstance(index, slice) or index < 0:
            self._finished("the number of documents")
        else:
            while index >= len(known := self.snapshot()):
                if not self.await_parts(len(known.manifest.parts) + 1):
                    break
        return self.snapshot()[index]

    @property
    def sealed(self) -> bool:
        """Whether the store is finished."""
        with self._lock:
            self._update()
        return self._sealed

    @property
    def digest(self) -> str:
        """The digest of the finished store."""
        return self._finished("its digest").digest

    @property
    def progress(self) -> "BuildProgress | None":
        """The progress of the build, if this process builds."""
        return None if self._builder is None else self._builder.progress

    def _finished(self, what: str) -> Manifest:
        """The manifest of the finished store; raise if `what` is asked of an unfinished one."""
        if not self.sealed:
            raise UnknownLengthError(
                f"{self.path} is still being written, and {what} is not known before the end. Pass "
                "Windows or Packs of it to a Loader, which reads parts as they become ready; for "
                "anything else, use ps.build."
            )
        return self._manifest

    def snapshot(self) -> Snapshot:
        """Return a store over the parts that can be read now; the same object if nothing is new."""
        with self._lock:
            before = None if self._last is None else self._last()
            self._update()
            # Compared by identity: a manifest is replaced, never changed, and may be long.
            is_new = before is None or before.manifest is not self._manifest
            if before is not None and not is_new:
                return before
            made = Snapshot(self, self._manifest, sealed=self._sealed)
            if before is not None:
                # A part has the same index in every snapshot.
                made.files.share(before.files)
            self._last = weakref.ref(made)
            return made

    def _update(self) -> None:
        """Read new records of the journal, or the manifest; the caller holds the lock."""
        if self._sealed:
            return
        parts: list[PartRecord] = []
        # Slices are read in order, without gaps: workers may seal a later one first.
        if not self._is_ours:  # raises if the journal belongs to another build
            self._is_ours = self._journal.begun(self._stamped) is not None
        while self._is_ours and (record := self._journal.readable(self._num_slices)) is not None:
            parts += [part for part in record.parts.values() if part.num_documents]
            self._num_slices += 1
        # The manifest is written before the journal is removed. So the journal is read first:
        # in the other order, the last parts could be missed.
        if not parts and (self.path / FILE_NAME).exists():
            manifest = read_manifest(self.path)
            self._refuse_other(manifest)
            self._manifest, self._sealed = manifest, True
            return
        if parts:
            known = self._manifest
            self._manifest = Manifest("", known.contents, known.parts.followed_by(parts))

    def _refuse_other(self, manifest: Manifest) -> None:
        """Raise if the manifest is of another build, or has other parts than were read."""
        found = {**manifest.settings, "inputs": comparable(manifest.builds[0]["inputs"])}
        known = self._manifest.parts
        ours = {key: self._stamped[key] for key in found if key in self._stamped}
        has_parts = manifest.parts[: len(known)] == known[:]
        if canonical_json(found) != canonical_json(ours) or not has_parts:
            raise StoreError(
                f"{self.path} is a finished store that was built with other settings: "
                f"{differences(found, ours) or 'its parts differ'}. Choose another directory, "
                "or delete this one."
            )

    def check(self) -> None:
        """Raise the error that ended the build of this process, if there is one."""
        if self._builder is not None and self._builder.error is not None:
            raise self._builder.error

    def await_parts(self, number: int) -> bool:
        """Wait until `number` parts are sealed; return False if the store has fewer.

        Raises StoreBusyError after `timeout` seconds, or the error that ended the build.
        """
        timer = StallTimer()
        while len(self._manifest.parts) < number and not self.sealed:
            # `sealed` has read the directory again, so the part may exist now.
            if len(self._manifest.parts) < number:
                self._wait(timer)
        return len(self._manifest.parts) >= number

    def await_later(self, than: TokenStore) -> None:
        """Wait until there is a later snapshot than `than`, unless the store is finished."""
        # `snapshot` returns the same object until something changes.
        timer = StallTimer()
        while (store := self.snapshot()) is than and not store.sealed:
            self._wait(timer)

    def _wait(self, timer: StallTimer) -> None:
        """Wait a few milliseconds for the next part; raise if the build failed or timed out."""
        builder, what = self._builder, f"part {len(self._manifest.parts)}"
        self.check()
        if builder is not None and builder.closed:
            problem = f"the stream was closed before {what} was built"
            raise StoreError(f"{self.path}: {problem}. Open it again to continue the build.")
        waited = timer.seconds(self._num_slices)
        if waited > self._timeout:
            raise StoreBusyError(
                f"{self.path}: no slice was sealed in {waited:,.0f} s (timeout={self._timeout:g}) "
                f"while {what} was awaited; {self._num_slices:,} slices are sealed. The last "
                f"process that built the store is {lock_holder(self.path) or 'not known'}. Check "
                "whether it is alive, or use a longer timeout."
            )
        if time.monotonic() > self._asked + _ASK_SECONDS:
            # A build that no reader waits for uses one core only; see `penstock.store.workers`.
            self._asked = time.monotonic()
            self._journal.ask()
        pause(_POLL_SECONDS)


_open_streams: "weakref.WeakSet[StreamedStore]" = weakref.WeakSet()


def _after_fork() -> None:
    """Make the streams of a forked child read only: the thread that builds is in the parent."""
    for store in _open_streams:
        # Another thread of the parent may have held this lock when the process was forked.
        store._lock = threading.Lock()
        store._builder = None
        store._finalizer.detach()


if os.name == "posix":
    os.register_at_fork(after_in_child=_after_fork)


def _close(builder: "Builder | None") -> None:
    if builder is not None:
        builder.close()
