"""Downloads one file; it appears under its name only when it is complete.

    .NAME.part   the bytes received so far
    NAME         appears by a rename, after length and SHA-256 were checked

If the SHA-256 of the file is known, an interrupted download resumes, even after a kill or from
another mirror: the digest shows whether all bytes belong to one version. Otherwise the download
starts again. If a server is silent or too slow for 30 seconds, the request is repeated a few times.

For files of the Hugging Face Hub, the package `huggingface_hub` reports size and SHA-256, and
respects the offline mode. The bytes are then transferred by this module, because `hf_hub_download`
(2.4) deletes a partial file on Ctrl-C, starts again from 0 after a kill, waits as long as a server
asks, and never gives up on a server that sends a byte every few seconds.
"""

import errno
import http.client
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.catalog.receipt import sha256_of
from penstock.catalog.request import (
    RequestFailure,
    connection_failure,
    hub_metadata,
    open_url,
    shown_url,
)
from penstock.digest import derive_key
from penstock.disk import rename, sync_file
from penstock.errors import DiskFullError, FetchError

_HUB = "https://huggingface.co/"
# Each block is written as soon as it is received, so a killed process loses at most one block.
_BLOCK_BYTES = 1 << 18
_NUMBER = "[0-9]{1,18}"  # of bytes; `int` refuses more than 4,300 digits
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

ByteProgress = Callable[[int, int | None], None]
"""Callback: called with the bytes done and the bytes of the whole file, None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DownloadLimits:
    """When a download retries and when it gives up."""

    attempts: int = 5
    """Give up after this many failures in a row."""
    backoff_seconds: float = 1.0
    """The wait after the first failure; it doubles after each further one."""
    max_wait_seconds: float = 120.0
    """The longest wait. A server that asks for a longer one is an error."""
    stall_seconds: float = 30.0
    """The longest wait for the headers of a response, and for the next bytes of its body."""
    min_bytes_per_second: float = 1_000.0
    """A response that is slower than this for `stall_seconds` is cancelled."""


class _WrongContent(Exception):  # noqa: N818  (an outcome that is acted upon)
    """A complete file that is not the right one."""


def download(
    urls: Sequence[str],
    path: Path,
    *,
    num_bytes: int | None = None,
    sha256: str | None = None,
    limits: DownloadLimits | None = None,
    progress: ByteProgress | None = None,
) -> int:
    """Download `path` from the first of `urls` that has it; return the bytes transferred.

    The caller must hold a lock: two downloads to the same path would write the same partial file.

    Raises:
        FetchError: no server delivered the file; the bytes received so far are kept.
        DiskFullError: there is not enough space for the file.
    """
    run = _Download(path, limits or DownloadLimits(), progress or (lambda done, total: None))
    failures = []
    for url in urls:
        try:
            run.run(url, num_bytes, sha256)
        except FetchError as error:
            failures.append(str(error))
        else:
            return run.received
    raise FetchError("\n".join(failures))


class _Download:
    """One download: its partial file on disk, and the expected size and SHA-256."""

    def __init__(self, path: Path, limits: DownloadLimits, progress: ByteProgress) -> None:
        self._path = path
        # Beside the file, so that the final rename stays on one file system and is atomic.
        self._part = path.with_name(f".{path.name}.part")
        self._limits = limits
        self._progress = progress
        self._num_bytes: int | None = None
        self._sha256: str | None = None
        self.received = 0

    def run(self, url: str, num_bytes: int | None, sha256: str | None) -> None:
        """Ask one server until the file is complete, or the limits are reached."""
        on_hub = url.startswith(_HUB)
        if on_hub and (endpoint := os.environ.get("HF_ENDPOINT")):
            url = f"{endpoint.rstrip('/')}/{url.removeprefix(_HUB)}"
        failures = wrong = 0
        while True:
            # Values from the Hub are used for one attempt only: the file may change before the next
            # one.
            self._num_bytes, self._sha256 = num_bytes, sha256
            before = self._size()
            try:
                if on_hub:
                    self._ask_hub(url)
                self._transfer(url)
                self._finish()
            except RequestFailure as failure:
                # Some servers end every long response early. If an attempt received 1 MiB, or a
                # twentieth of the file, the download will be complete in the end, so this failure
                # counts as the first one.
                enough = min(1 << 20, max(1, (self._num_bytes or 1 << 60) // 20))
                failures = 1 if self._size() - before >= enough else failures + 1
                self._wait_or_give_up(url, failure, failures)
            except _WrongContent as failure:
                self._part.unlink(missing_ok=True)
                wrong += 1
                # One wrong file may be the fault of a disk or a proxy. Two wrong files mean that
                # the server has another file.
                if wrong == 2:
                    raise FetchError(f"{shown_url(url)}: {failure}") from None
            else:
                return

    def _wait_or_give_up(self, url: str, failure: RequestFailure, failures: int) -> None:
        limits = self._limits
        # If there is no network, more than three attempts only make the user wait.
        attempts = limits.attempts if failure.status else min(3, limits.attempts)
        asked = failure.wait_seconds
        if not failure.retry or failures >= attempts or asked > limits.max_wait_seconds:
            asks = f" and asks to retry in {asked:,.0f} s" if asked else ""
            times = f", {failures} times in a row" if failures > 1 else ""
            # Without a SHA-256 the next run starts from 0, so the message does not say that bytes
            # are kept.
            kept = self._size() if self._sha256 else 0
            keeps = f" {kept:,} bytes are kept." if kept else ""
            raise FetchError(f"{shown_url(url)}: {failure}{asks}{times}.{keeps}")
        # The wait is 1 to 1.5 times the backoff, so that machines that start together do not retry
        # together.
        spread = 1 + derive_key("backoff", os.getpid(), failures) % 1000 / 2000
        backoff = limits.backoff_seconds * 2 ** (failures - 1) * spread
        time.sleep(max(asked, min(backoff, limits.max_wait_seconds)))

    def _ask_hub(self, url: str) -> None:
        """Ask the Hub for the size and SHA-256; raise if the SHA-256 is not the expected one."""
        num_bytes, sha256 = hub_metadata(url, self._limits.stall_seconds)
        if sha256 and self._sha256 not in (None, sha256):
            raise RequestFailure(
                f"the Hub has a file with SHA-256 {sha256}, but {self._sha256} is expected"
            )
        self._num_bytes = self._num_bytes or num_bytes
        self._sha256 = self._sha256 or sha256

    def _transfer(self, url: str) -> None:
        """Send one request and append its body to the partial file."""
        # Resume only if the SHA-256 is known: only the digest of the whole file can show that all
        # bytes belong to one version.
        start = self._size() if self._sha256 else 0
        if start and start == self._num_bytes:
            return  # a process was killed between the last byte and the rename
        headers = {"Range": f"bytes={start}-"} if start else {}
        try:
            answer = open_url(url, headers, self._limits.stall_seconds)
        except RequestFailure as failure:
            if failure.status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                self._part.unlink(missing_ok=True)
                raise RequestFailure(
                    "the part is longer than the file", retry=True, status=416
                ) from None
            raise
        with answer:
            start, total = self._check_answer(answer, start)
            self._check_room((total or start) - start)
            self._part.touch()
            with self._part.open("rb+", buffering=0) as stream:
                stream.truncate(start)
                stream.seek(start)
                self._receive(answer, stream, start, total)

    def _check_answer(self, answer: Any, start: int) -> tuple[int, int | None]:
        """Return the first byte of the answer's body, and the length of the whole file."""
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestFailure("the server compressed the file, though it was asked not to")
        if answer.status == http.client.PARTIAL_CONTENT and start:
            text = answer.headers.get("Content-Range") or ""
            found = re.fullmatch(f"bytes {start}-[0-9]+/({_NUMBER})", text)
            if not found:
                # Nothing was received. The next attempt asks for the whole file instead.
                self._part.unlink()
                wrong = f"the server sent {text[:60]!r} instead of the bytes from {start:,}"
                raise RequestFailure(wrong, retry=True, status=answer.status)
            length = found[1]
        elif answer.status == http.client.OK:
            # A server that ignores the Range header answers like this too. The partial file is then
            # written from 0 again.
            start, length = 0, answer.headers.get("Content-Length") or ""
        else:
            raise RequestFailure(f"the server answered {answer.status} and sent no file")
        # `isdigit` would accept "²", which `int` refuses.
        total = int(length) if re.fullmatch(_NUMBER, length) else None
        expected = self._num_bytes
        if total is not None and expected is not None and total != expected:
            raise RequestFailure(f"the server has {total:,} bytes, but {expected:,} are expected")
        if total is None and expected is None and not self._sha256 and not answer.chunked:
            raise RequestFailure(
                "the server does not report the length, so a truncated file would not be noticed"
            )
        return start, total if total is not None else expected

    def _receive(self, answer: Any, stream: Any, start: int, total: int | None) -> None:
        done, limits = start, self._limits
        window, in_window = time.monotonic(), 0
        self._progress(done, total)
        while total is None or done < total:
            room = _BLOCK_BYTES if total is None else min(_BLOCK_BYTES, total - done)
            try:
                # read1 returns the bytes received so far; read would wait for the whole block.
                piece = answer.read1(room)
            except (OSError, http.client.HTTPException) as error:
                raise connection_failure(error, limits.stall_seconds) from None
            if not piece:
                break
            self._write(stream, piece)
            done += len(piece)
            in_window += len(piece)
            self.received += len(piece)
            self._progress(done, total)
            # The socket's timeout detects only silence. A server that sends a byte every few
            # seconds never times out, so the rate is measured over windows of `stall_seconds`.
            waited = time.monotonic() - window
            if waited >= limits.stall_seconds:
                if in_window < limits.min_bytes_per_second * waited:
                    slow = f"only {in_window:,} bytes came in {waited:.0f} s"
                    raise RequestFailure(slow, retry=True, status=answer.status)
                window, in_window = time.monotonic(), 0
        if total is not None and done < total:
            cut = f"the connection ended at byte {done:,} of {total:,}"
            raise RequestFailure(cut, retry=True, status=answer.status)

    def _write(self, stream: Any, piece: bytes) -> None:
        # Unbuffered, so that a kill keeps all bytes; an unbuffered write may be partial.
        view = memoryview(piece)
        try:
            while view:
                view = view[stream.write(view) :]
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise self._no_room(error.errno, "more space") from error
            raise

    def _check_room(self, num_bytes: int) -> None:
        if num_bytes > shutil.disk_usage(self._path.parent).free:
            raise self._no_room(errno.ENOSPC, f"{num_bytes:,} more bytes")

    def _no_room(self, number: int, needed: str) -> DiskFullError:
        free = shutil.disk_usage(self._path.parent).free
        return DiskFullError(
            number,
            f"The disk is full: {self._path} needs {needed}, and {free:,} bytes are free. "
            "Received bytes are kept. Free some space and run the same command again to resume",
        )

    def _finish(self) -> None:
        """Check the partial file, force it to disk, and rename it."""
        size = self._size()
        if self._num_bytes is not None and size != self._num_bytes:
            raise _WrongContent(f"received {size:,} bytes, but {self._num_bytes:,} are expected.")
        if self._sha256 and (found := sha256_of(self._part)) != self._sha256:
            raise _WrongContent(f"received SHA-256 {found}, but {self._sha256} is expected.")
        # The contents are synced before the rename: after a power cut, the name must not belong to
        # an empty file.
        sync_file(self._part)
        rename(self._part, self._path)

    def _size(self) -> int:
        with suppress(FileNotFoundError):
            return self._part.stat().st_size
        return 0
