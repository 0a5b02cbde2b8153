"""Progress bars, on stderr and only in a terminal.

━━━━━━━━━━━━━━━╸              52%  312 MB/s  71.2M tokens/s  0:12 left  3 rejected
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.cli.terminal import console
from penstock.cli.units import clock_text, count_text, size_text

if TYPE_CHECKING:
    from penstock.store.job import BuildProgress

Draw = Callable[[int, int, str], None]
"""Draws a bar: (done, total, the text beside the bar)."""


class Meter:
    """The speed and the remaining time of a build.

    It measures from the first report on, so parts of an earlier run do not count as speed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = 0.0
        self.first: BuildProgress | None = None

    def line(self, now: "BuildProgress") -> str:
        """The text beside the bar."""
        if self.first is None:
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
def build_bar(*, shown: bool) -> Iterator[tuple[Meter, "Callable[[BuildProgress], None]"]]:
    """A bar for a build: its meter, and the callback for `progress=`."""
    meter = Meter()
    with bar(shown=shown) as draw:
        yield meter, lambda now: draw(now.done_bytes, now.total_bytes, meter.line(now))


@contextmanager
def bar(*, shown: bool = True) -> Iterator[Draw]:
    """A function that draws a progress bar; the bar is removed at the end."""
    # In a log file, each update of a bar would be a new line.
    if not (shown and sys.stderr.isatty()):
        yield lambda done, total, text: None
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
