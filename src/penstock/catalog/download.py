"""A file from a server, whole or not at all.

    .NAME.part        what has come so far
    .NAME.part.json   of which version of the file: ETag, date, length
    NAME              appears by a rename, when length and SHA-256 are right

A download that ends early, in this process or in one that was killed, goes on with a
Range request that names the version (If-Range), so that two versions never make one file.
Where the server names none, only a file whose SHA-256 is known is continued. A server that
sends nothing, or a byte a second, is left after half a minute and asked again.
"""

import errno
import http.client
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.catalog.request import Refused, Transient, open_url, shown_url, told
from penstock.digest import derive_key
from penstock.errors import DiskFullError, FetchError
from penstock.store.files import digest_file, sync_directory, write_file

__all__ = ["Patience", "Progress", "download"]

_BLOCK_BYTES = 1 << 18
# An attempt that brought this much, or a twentieth of the file, was no failure: a server
# that cuts every answer is borne as long as it gets somewhere.
_GAIN_BYTES = 1 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are there and those of the whole file, where known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long to bear a server."""

    attempts: int = 5
    """Failures in a row that brought nothing, before giving up."""
    backoff_seconds: float = 1.0
    """The wait after the first failure; it doubles with each."""
    max_wait_seconds: float = 120.0
    """The longest wait, also where a server asks for more."""
    stall_seconds: float = 30.0
    """How long nothing, or less than `min_bytes_per_second`, may come."""
    min_bytes_per_second: float = 1_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The file that is meant."""

    path: Path
    num_bytes: int | None = None
    sha256: str | None = None


def download(
    urls: Sequence[str],
    wanted: Wanted,
    *,
    patience: Patience | None = None,
    progress: Progress | None = None,
) -> int:
    """Bring a file from the first of `urls` that has it; returns the bytes transferred.

    The caller holds a lock: two downloads to one path would spoil each other's part.

    Raises:
        FetchError: no server gave the file; what has come is kept.
        DiskFullError: there is no room for it.
    """
    run = _Download(wanted, patience or Patience(), progress or _tell_nobody)
    failures = []
    for url in urls:
        try:
            run.bring(url)
        except FetchError as error:
            failures.append(str(error))
        else:
            return run.received
    raise FetchError("\n".join(failures))


def _tell_nobody(done: int, total: int | None) -> None:
    pass


class _OtherContent(Exception):  # noqa: N818  (an outcome that is acted upon)
    """The file came in full and is not the one that is meant."""


class _Download:
    """The state of one download: its part on disk and what is known of it."""

    def __init__(self, wanted: Wanted, patience: Patience, progress: Progress) -> None:
        self._wanted = wanted
        self._patience = patience
        self._progress = progress
        self._part = wanted.path.with_name(f".{wanted.path.name}.part")
        self._note = wanted.path.with_name(f".{wanted.path.name}.part.json")
        self.received = 0

    def bring(self, url: str) -> None:
        """Ask one server until the file is there or patience ends."""
        failures = others = 0
        while True:
            before = self._size()
            try:
                self._attempt(url)
                self._seal()
            except Transient as failure:
                gained = self._size() - before
                if gained >= min(_GAIN_BYTES, max(1, (self._wanted.num_bytes or 1 << 60) // 20)):
                    failures = 0
                failures += 1
                self._give_up_or_wait(url, failure, failures)
            except Refused as failure:
                raise FetchError(f"{shown_url(url)}: {failure.reason}.") from None
            except _OtherContent as other:
                self._discard()
                others += 1
                if others == 2:  # once may be a disk or a proxy; twice is the file
                    raise FetchError(f"{shown_url(url)}: {other}") from None
            else:
                return

    def _give_up_or_wait(self, url: str, failure: Transient, failures: int) -> None:
        # Without a network nothing will come; a few seconds tell that from a hiccup.
        limit = min(3, self._patience.attempts) if failure.offline else self._patience.attempts
        asked = failure.wait_seconds or 0.0
        if failures >= limit or asked > self._patience.max_wait_seconds:
            kept = f" {self._size():,} bytes are kept." if self._size() else ""
            asks = f" and asks to come back in {asked:,.0f} s" if asked else ""
            times = f", {failures} times in a row" if failures > 1 else ""
            raise FetchError(f"{shown_url(url)}: {failure.reason}{asks}{times}.{kept}")
        # Many machines that start together must not come back together.
        spread = 1 + derive_key("backoff", os.getpid(), failures) % 1000 / 2000
        backoff = self._patience.backoff_seconds * 2 ** (failures - 1) * spread
        time.sleep(max(asked, min(backoff, self._patience.max_wait_seconds)))

    def _attempt(self, url: str) -> None:
        """One request and its body."""
        start, headers = self._continuation(url)
        try:
            answer = open_url(url, headers, self._patience.stall_seconds)
        except Refused as refused:
            if refused.status != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            whole = _content_range(refused.headers)[1]
            said = (self._wanted.num_bytes, self._read_note().get("total"))
            if start and whole == start and all(length in (None, start) for length in said):
                return  # everything had come, and the process was killed before the rename
            self._discard()
            raise Transient("it has no such range any more") from None
        with answer:
            start, total = self._begin(url, answer, start)
            self._write_note(url, answer.headers, total)
            self._need_room((total or start) - start)
            with self._opened(start) as stream:
                self._copy(answer, stream, start, total)

    def _continuation(self, url: str) -> tuple[int, dict[str, str]]:
        """Where to go on, and the headers that ask for it."""
        start, note = self._size(), self._read_note()
        limit = self._wanted.num_bytes
        if not start or (limit is not None and start > limit):
            return 0, {}
        validator = note.get("validator") if note.get("url") == shown_url(url) else None
        if validator:
            return start, {"Range": f"bytes={start}-", "If-Range": str(validator)}
        if self._wanted.sha256:  # whatever comes, the digest will tell
            return start, {"Range": f"bytes={start}-"}
        return 0, {}

    def _begin(self, url: str, answer: Any, start: int) -> tuple[int, int | None]:
        """Where the body of `answer` begins, and how long the whole file is."""
        if answer.status == http.client.PARTIAL_CONTENT and start:
            first, total = _content_range(answer.headers)
            known = self._read_note()
            length, etag = known.get("total"), known.get("etag")
            # Two servers name one version differently; then the digest has to tell.
            same = known.get("url") != shown_url(url) or etag in (None, answer.headers.get("ETag"))
            if first != start or not same or (length is not None and total != length):
                self._discard()
                raise Transient("the file changed between two ranges; starting over")
        elif answer.status == http.client.OK:
            start, length = 0, answer.headers.get("Content-Length")
            total = int(length) if length and length.isdigit() else None
        else:
            raise Refused(f"the server answered {answer.status} and no file")
        wanted = self._wanted.num_bytes
        if total is not None and wanted is not None and total != wanted:
            raise Refused(f"it has {total:,} bytes there, and {wanted:,} are right")
        if total is None and wanted is None and not self._wanted.sha256 and not answer.chunked:
            raise Refused("the server does not say how long the file is, so a cut cannot be told")
        return start, total if total is not None else wanted

    def _copy(self, answer: Any, stream: Any, start: int, total: int | None) -> None:
        done, patience = start, self._patience
        window, in_window = time.monotonic(), 0
        self._progress(done, total)
        while total is None or done < total:
            room = _BLOCK_BYTES if total is None else min(_BLOCK_BYTES, total - done)
            try:
                piece = answer.read1(room)
            except (OSError, http.client.HTTPException) as error:
                raise told(error, patience.stall_seconds) from None
            if not piece:
                break
            self._write(stream, piece)
            done += len(piece)
            in_window += len(piece)
            self.received += len(piece)
            self._progress(done, total)
            waited = time.monotonic() - window
            if waited >= patience.stall_seconds:
                if in_window < patience.min_bytes_per_second * waited:
                    raise Transient(f"only {in_window:,} bytes came in {waited:.0f} s")
                window, in_window = time.monotonic(), 0
        if total is not None and done < total:
            raise Transient(f"the connection ended at byte {done:,} of {total:,}")

    def _seal(self) -> None:
        """Check the part and give it its name."""
        size, wanted = self._size(), self._wanted
        if wanted.num_bytes is not None and size != wanted.num_bytes:
            raise _OtherContent(f"{size:,} bytes came, and {wanted.num_bytes:,} are right.")
        if wanted.sha256 and (found := digest_file(self._part)) != wanted.sha256:
            raise _OtherContent(
                f"the file that came has SHA-256 {found}, and {wanted.sha256} is right. "
                "It was thrown away."
            )
        with self._part.open("rb+") as stream:
            os.fsync(stream.fileno())
        self._part.replace(wanted.path)
        self._note.unlink(missing_ok=True)
        sync_directory(wanted.path.parent)

    def _opened(self, start: int) -> Any:
        """The part, opened to go on at `start`."""
        flags = os.O_RDWR | os.O_CREAT
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        stream = os.fdopen(os.open(self._part, flags, 0o644), "rb+", buffering=0)
        stream.truncate(start)
        stream.seek(start)
        return stream

    def _write(self, stream: Any, piece: bytes) -> None:
        view = memoryview(piece)
        try:
            while view:
                view = view[stream.write(view) :]
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise self._no_room(error.errno, 0) from error
            raise

    def _need_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._wanted.path.parent).free
        if num_bytes > free:
            raise self._no_room(errno.ENOSPC, num_bytes)

    def _no_room(self, number: int, num_bytes: int) -> DiskFullError:
        more = f"{num_bytes:,} more bytes" if num_bytes else "more"
        free = shutil.disk_usage(self._wanted.path.parent).free
        return DiskFullError(
            number,
            f"No room for {self._wanted.path}: it needs {more}, and {free:,} are free. What has "
            "come is kept; make room and run the same command again to go on",
        )

    def _size(self) -> int:
        with suppress(FileNotFoundError):
            return self._part.stat().st_size
        return 0

    def _discard(self) -> None:
        self._part.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def _read_note(self) -> dict[str, Any]:
        try:
            note = json.loads(self._note.read_bytes())
        except (OSError, ValueError):
            return {}
        return note if isinstance(note, dict) else {}

    def _write_note(self, url: str, headers: Any, total: int | None) -> None:
        """Before the first byte: a part without a note is of an unknown version."""
        etag, date = headers.get("ETag"), headers.get("Last-Modified")
        strong = etag if etag and not etag.startswith("W/") else None
        note = {"url": shown_url(url), "etag": etag, "validator": strong or date, "total": total}
        if note != self._read_note():
            write_file(self._note, [json.dumps(note).encode()])


def _content_range(headers: Any) -> tuple[int | None, int | None]:
    """First byte and length of the whole, of `bytes 5-9/10` or `bytes */10`."""
    found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", headers.get("Content-Range") or "")
    if not found:
        return None, None
    first, whole = found.groups()
    return (int(first) if first else None), (int(whole) if whole != "*" else None)
