"""A store whose parts become readable one after the other.

All that is known of it comes from its directory: the journal's record of each sealed slice,
and at the end the manifest. So it makes no difference which process builds, and a reader that
comes later, or again, finds what there is at once. Parts are never changed once sealed; a
growing store only ever knows a prefix of what the finished one will hold.
"""

import math
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from penstock.digest import canonical_json
from penstock.errors import StoreBusyError, StoreError, UnknownLengthError
from penstock.store.explain import differences
from penstock.store.job import BuildProgress
from penstock.store.journal import MANY_TOKENS, Journal
from penstock.store.lock import lock_holder
from penstock.store.manifest import (
    FILE_NAME,
    Manifest,
    PartRecord,
    read_manifest,
    shared_settings,
)
from penstock.store.reader import TokenStore
from penstock.streaming.builder import Builder
from penstock.streaming.dropping import WHOLE
from penstock.streaming.marks import Wishes, has_readers
from penstock.streaming.waiting import Patience, nap

__all__ = ["GrowingStore"]

_NAP_SECONDS = 0.004
_ASK_SECONDS = 0.05
_JOINED_AHEAD = 1  # slices, of a reader that keeps parts beside one that drops them


class GrowingStore(TokenStore):
    """What `ps.stream` returns: a store that is still being written, for `Windows` or `Packs`.

    Reading what is not there yet waits for it, at most `timeout` seconds from one sealed slice to
    the next. How many documents there will be is not known before the end. Safe to use from
    several threads; in a forked or unpickled copy it only reads.

    Closing it (or leaving its `with` block, or dropping it, or ending the process) ends the build
    where it is; the same call goes on there.
    """

    growing = True

    def __init__(
        self,
        path: Path,
        stamped: dict[str, Any],
        dtype: str,
        *,
        timeout: float,
        ahead: int | None,
        builder: Builder | None,
    ) -> None:
        self.path = path
        self._stamped = stamped
        self._timeout = timeout
        self._ahead = ahead
        self._builder = builder
        told = {key: stamped[key] for key in ("reading", "inputs")}
        contents = {"dtype": dtype, **shared_settings(stamped), "builds": [told]}
        self._open(Manifest("", contents, ()))
        self._journal = Journal(path)
        self._is_ours = False
        self._num_slices = 0
        self._sealed = False
        self._asked = -math.inf  # when the builder was last told that somebody waits
        self._growth = Lock()
        self._wishes = None if ahead is None else Wishes(path, ahead)
        self._is_copy = False  # of a fork
        self._held = [] if self._wishes is None else [self._wishes]
        self._finalizer = weakref.finalize(self, _leave, builder, self._held)
        _open_streams.add(self)
        if not self.poll() and self._num_slices == 0 and self._wishes is not None:
            # Wanted before anybody asks; a run that resumes says itself where it is.
            for number in range((ahead or 0) + 1):
                self._wishes.add(number, None)

    def _open(self, manifest: Manifest) -> None:
        """Begin with these parts; what `TokenStore` does with those of a finished store."""
        self.dtype = np.dtype(manifest.contents["dtype"]).newbyteorder("<")
        self._mapped: OrderedDict[tuple[int, str], NDArray[Any]] = OrderedDict()
        self._lock = Lock()
        self._take(manifest)

    def _take(self, manifest: Manifest) -> None:
        parts = manifest.parts
        self._document_ends = np.cumsum([part.num_documents for part in parts], dtype=np.int64)
        self._token_ends = np.cumsum([part.num_tokens for part in parts], dtype=np.int64)
        self.manifest = manifest

    def __repr__(self) -> str:
        parts = len(self.manifest.parts)
        whole = "sealed" if self._sealed else "so far"
        return (
            f"GrowingStore({str(self.path)!r}: {parts:,} parts, {self.num_tokens:,} tokens {whole})"
        )

    def __getstate__(self) -> dict[str, Any]:
        kept = ("path", "_stamped", "_timeout", "_ahead")
        return {name: getattr(self, name) for name in kept} | {"dtype": self.dtype.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["path"],
            state["_stamped"],
            state["dtype"],
            timeout=state["_timeout"],
            ahead=state["_ahead"],
            builder=None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the build where it is, if this process builds; parts that are sealed stay."""
        self._finalizer()

    def __len__(self) -> int:
        if not self._sealed:
            self._refuse("how many documents it will hold")
        return super().__len__()

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """The tokens of each document, in order; waits for those that are not there yet."""
        part = 0
        while self.await_parts(part + 1):
            tokens, start = self.part_array(part, "tokens"), 0
            for stop in self.part_array(part, "bounds").tolist():
                yield tokens[start:stop]
                start = stop
            part += 1

    @property
    def sealed(self) -> bool:
        """Whether all parts are there; then it is a store like any other."""
        return self._sealed

    @property
    def drops_parts(self) -> bool:
        """Whether parts behind the readers are removed."""
        return self._ahead is not None

    @property
    def digest(self) -> str:
        """The digest of the finished store."""
        if not self._sealed:
            self._refuse("its digest")
        return self.manifest.digest

    @property
    def progress(self) -> BuildProgress | None:
        """How far the build is, where this process is the one that builds."""
        return None if self._builder is None else self._builder.progress

    def _refuse(self, what: str) -> NoReturn:
        raise UnknownLengthError(
            f"{self.path} is still being written: {len(self.manifest.parts):,} parts are sealed, "
            f"and {what} is not known before the last one is. Give Windows or Packs of it to a "
            "Loader, which reads parts as they come; for anything else, use ps.build."
        )

    def poll(self) -> bool:
        """Take up what was sealed since; whether that is all there will be."""
        if self._sealed:
            return True
        with self._growth:
            parts: list[PartRecord] = []
            while (
                self._begun() and (record := self._journal.readable(self._num_slices)) is not None
            ):
                parts += [part for part in record.parts.values() if part.num_documents]
                self._num_slices += 1
            if parts:
                before = self.manifest
                self._take(Manifest("", before.contents, (*before.parts, *parts)))
            elif not self._sealed:
                self._look_for_the_end()
        return self._sealed

    def _begun(self) -> bool:
        """Whether the journal that lies there is of this build."""
        if not self._is_ours:
            begun = self._journal.begun()
            if begun is None:
                return False
            if canonical_json(begun) != canonical_json(self._stamped):
                raise StoreError(
                    f"{self.path} holds an unfinished build with other settings: "
                    f"{differences(begun, self._stamped)}. Repeat it with the old ones to finish "
                    "it, or delete the directory to start anew."
                )
            self._is_ours = True
        return True

    def _look_for_the_end(self) -> None:
        folders = [self.path] if self._ahead is None else [self.path, self.path / WHOLE]
        for folder in folders:
            if (folder / FILE_NAME).exists():
                manifest = read_manifest(folder)
                self._refuse_other(manifest)
                self._take(manifest)
                self._sealed = True
                self._ahead = None if folder == self.path else self._ahead
                return

    def _refuse_other(self, manifest: Manifest) -> None:
        """Raise where the manifest is not of this build, or not of the parts that were read."""
        first = manifest.contents["builds"][0]
        told = {
            **shared_settings(manifest.contents),
            **{k: first[k] for k in ("reading", "inputs")},
        }
        ours = {key: self._stamped[key] for key in told if key in self._stamped}
        known = self.manifest.parts
        if canonical_json(told) != canonical_json(ours) or manifest.parts[: len(known)] != known:
            raise StoreError(
                f"{self.path} is a finished store that was built differently: "
                f"{differences(told, ours) or 'its parts are others'}. Choose another directory, "
                "or delete this one."
            )

    def check(self) -> None:
        """Raise what ended the build of this process, if something did."""
        if self._builder is not None and self._builder.error is not None:
            raise self._builder.error

    def await_parts(self, number: int) -> bool:
        """Wait until `number` parts are sealed; False where there will not be so many.

        Raises:
            StoreBusyError: nothing was sealed for `timeout` seconds.
            BaseException: whatever ended the build.
        """
        patience = Patience()
        while len(self.manifest.parts) < number:
            if self.poll():
                return len(self.manifest.parts) >= number
            if len(self.manifest.parts) < number:
                self._want(self._num_slices)
                self._await(f"part {number - 1}", patience)
        return True

    def await_news(self, num_parts: int, num_tokens: int) -> None:
        """Wait until there are more parts, or known to be more tokens, than these; or no more."""
        patience = Patience()
        while not self.poll() and len(self.manifest.parts) <= num_parts:
            if self.least_tokens > num_tokens:
                return
            self._want(self._num_slices)
            self._await(f"part {num_parts}", patience)

    @property
    def least_tokens(self) -> int:
        """How many tokens there are at the least: in parts, and in the one that is being made."""
        more = not self._sealed and self._journal.has_many(self._num_slices)
        return self.num_tokens + (MANY_TOKENS if more else 0)

    def _await(self, what: str, patience: Patience) -> None:
        """Wait a moment for something that is not there, but not for ever."""
        self.check()
        builder = self._builder
        if builder is not None and builder.closed:
            raise StoreError(f"{self.path}: {what} is not there, and the stream was closed.")
        waited = patience.spend(self._num_slices)
        if waited > self._timeout:
            raise StoreBusyError(
                f"{self.path}: {what} was waited for, and nothing was sealed for {waited:,.0f} s "
                f"(timeout={self._timeout:g}); {self._num_slices:,} slices are. "
                f"{self._told_builder()} See whether it is alive, or give a longer timeout."
            )
        now = time.monotonic()
        if now > self._asked + _ASK_SECONDS:
            self._asked = now
            self._journal.ask()
        nap(_NAP_SECONDS)

    def _told_builder(self) -> str:
        if self._builder is not None and self._builder.building:
            return "This very process builds it."
        if holder := lock_holder(self.path):
            return f"The process that builds it, or did last, is {holder}."
        return "No process has begun to build it."

    def part_array(self, part: int, kind: str) -> NDArray[Any]:
        """One array of one part; of a part that was dropped, when it was made again."""
        patience = Patience()
        while True:
            try:
                return super().part_array(part, kind)
            except StoreError as error:
                # Looking first would not do: another reader's next part may be the end of ours.
                is_gone = isinstance(error.__context__, FileNotFoundError)
                if not is_gone or self._is_kept_whole():
                    raise
            self._want(self.manifest.parts[part].number)
            self._await(f"part {part}, which was dropped and is made again,", patience)

    def _is_kept_whole(self) -> bool:
        """Whether all parts are there to stay, so that one that is missing is lost."""
        return self.poll() and self._ahead is None

    def reading(self, reader: Any, part: int) -> None:
        """Say that `reader` is at a part, so that those before it may be dropped."""
        if self._wishes is None or self._ahead is None:
            return
        parts = self.manifest.parts
        number = parts[part].number if part < len(parts) else self._num_slices
        wanted = self._wishes.place(reader, number, self._total)
        with self._lock:  # a file that is mapped takes up its room also after it was removed
            # Another thread may have mapped a part since that was not known above.
            known = [key for key in self._mapped if key[0] < len(parts)]
            for key in [key for key in known if parts[key[0]].number not in wanted]:
                del self._mapped[key]

    def _want(self, number: int) -> None:
        if self._wishes is None and not self._is_copy:
            self._join()
        if self._wishes is not None:
            self._wishes.add(number, self._total)

    def _join(self) -> None:
        """Say what is wanted from now on, where another process drops what nobody wants."""
        if (self._builder is not None and self._builder.building) or not has_readers(self.path):
            return
        with self._growth:
            if self._wishes is None:
                self._ahead = _JOINED_AHEAD
                self._wishes = Wishes(self.path, _JOINED_AHEAD)
                self._held.append(self._wishes)
                if not self._finalizer.alive:  # this stream was closed, perhaps just now
                    self._wishes.close()

    @property
    def _total(self) -> int | None:
        """How many slices there are, where that is known."""
        return int(self.manifest.contents["builds"][0]["slices"]) if self._sealed else None

    @property
    def _exceeds_memory(self) -> bool:
        return False  # rows come part after part, so what lies beside one is wanted soon


_open_streams: "weakref.WeakSet[GrowingStore]" = weakref.WeakSet()


def _after_fork() -> None:
    """A child only reads: the thread that builds stayed behind, with what it may have held."""
    for store in _open_streams:
        store._growth, store._lock = Lock(), Lock()
        store._builder = store._wishes = None
        store._is_copy = True
        store._finalizer.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _leave(builder: Builder | None, held: list[Wishes]) -> None:
    if builder is not None:
        builder.close()
    for wishes in held:
        wishes.close()
