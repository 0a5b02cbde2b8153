"""Progress on stderr: a bar in a terminal, and otherwise a line every ten seconds.

━━━━━━━━━━━━━━━╸              52%  312 MB/s  71.2M tokens/s  0:12 left  3 rejected

52%  312 MB/s  71.2M tokens/s  0:12 left  3 rejected
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from penstock.cli.terminal import console, visible
from penstock.cli.units import clock_text, count_text, size_text

if TYPE_CHECKING:
    from penstock.store.job import BuildProgress

_LINE_SECONDS = 10.0  # between two lines, without a terminal

Draw = Callable[[int, int, str], None]
"""Shows progress: (done, total or 0 if it is not known, the text beside the bar)."""


class Meter:
    """Measures the speed and the remaining time of a build.

    The clock starts at the first report, so parts that an earlier run built do not count as speed.
    It starts again when the total changes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = 0.0
        self.first: BuildProgress | None = None

    def line(self, now: "BuildProgress") -> str:
        """The text beside the bar."""
        if self.first is None or now.total_bytes != self.first.total_bytes:
            self.first, self._started = now, self._clock()
        # On the first call no time has passed; the small number avoids a division by zero.
        seconds = max(self._clock() - self._started, 1e-9)
        parts = []
        if now.text_bytes > self.first.text_bytes:
            parts.append(f"{size_text((now.text_bytes - self.first.text_bytes) / seconds)}/s")
            tokens = (now.num_tokens - self.first.num_tokens) / seconds
            parts.append(f"{count_text(tokens)} tokens/s")
        # The remaining time follows from bytes of files, which are known in advance. Bytes of
        # text are not known for compressed files.
        done = now.done_bytes - self.first.done_bytes
        if done > 0:
            parts.append(f"{clock_text((now.total_bytes - now.done_bytes) * seconds / done)} left")
        if now.num_rejects:
            parts.append(f"{now.num_rejects:,} rejected")
        return "  ".join(parts)


@contextmanager
def build_bar(*, shown: bool = True) -> Iterator[tuple[Meter, "Callable[[BuildProgress], None]"]]:
    """A progress bar for a build; yields its meter, and the callback for `progress=`."""
    meter = Meter()
    with bar(shown=shown) as draw:
        yield meter, lambda now: draw(now.done_bytes, now.total_bytes, meter.line(now))


def build_lines(write: Callable[[str], None]) -> "Callable[[BuildProgress], None]":
    """The callback for `progress=` that writes a line every ten seconds."""
    meter, draw = Meter(), _line_writer(write)
    return lambda now: draw(now.done_bytes, now.total_bytes, meter.line(now))


@contextmanager
def bar(*, shown: bool = True) -> Iterator[Draw]:
    """Yield a function that shows progress: on a bar that is removed at the end, or as lines."""
    if not shown:
        yield lambda done, total, text: None
        return
    # In a log file, each update of a bar would be a new line with escape codes.
    if not sys.stderr.isatty():
        yield _line_writer(_write_error_line)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    progress = Progress(
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        # A file name may contain brackets, which rich would read as markup.
        TextColumn("{task.fields[text]}", markup=False),
        console=console(stderr=True),
        transient=True,  # only results stay on the screen
        expand=True,
    )
    # Without a total, rich draws a moving bar until the first report.
    task = progress.add_task("", total=None, text="starting")
    with progress:
        yield lambda done, total, text: progress.update(
            task, completed=done, total=total or None, text=text
        )


def _line_writer(write: Callable[[str], None]) -> Draw:
    """A function that writes progress as a line, if the last one was written ten seconds ago."""
    last = time.monotonic()  # work that takes less than ten seconds writes no line at all

    def draw(done: int, total: int, text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_SECONDS:
            last = time.monotonic()
            share = f"{done / total:.0%}  " if total else ""
            write(f"{share}{visible(text, lines=False)}".rstrip())

    return draw


def _write_error_line(line: str) -> None:
    # A closed pipe (`2>&1 | head`) or a full disk loses the line, but must not end the work.
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
