"""Progress bars: on stderr, and only where somebody looks.

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
    from rich.progress import Progress as RichProgress

    from penstock.store.job import Progress

__all__ = ["Meter", "bar", "build_bar"]


class Meter:
    """Speed and remaining time of a build, from what its progress callback is told.

    Measured from the first call on, so that parts which an earlier run sealed do not count
    as work of this one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = 0.0
        self.first: Progress | None = None

    def line(self, now: "Progress") -> str:
        """What stands behind the bar."""
        if self.first is None:
            self.first, self._begun = now, self._clock()
        seconds = self._clock() - self._begun
        pieces = []
        if seconds > 0 and now.text_bytes > self.first.text_bytes:
            bytes_a_second = (now.text_bytes - self.first.text_bytes) / seconds
            tokens_a_second = (now.num_tokens - self.first.num_tokens) / seconds
            pieces.append(f"{size_text(bytes_a_second)}/s")
            pieces.append(f"{count_text(tokens_a_second)} tokens/s")
        done_a_second = (now.done_bytes - self.first.done_bytes) / max(seconds, 1e-9)
        if done_a_second > 0:
            left = (now.total_bytes - now.done_bytes) / done_a_second
            pieces.append(f"{clock_text(left)} left")
        if now.num_rejects:
            pieces.append(f"{now.num_rejects:,} rejected")
        return "  ".join(pieces)


@contextmanager
def build_bar(*, shown: bool) -> Iterator[tuple[Meter, "Callable[[Progress], None]"]]:
    """A bar for `penstock.build`: the meter behind it and the callback to pass."""
    meter = Meter()
    with bar(shown=shown) as draw:

        def tell(now: "Progress") -> None:
            draw(now.done_bytes, now.total_bytes, meter.line(now))

        yield meter, tell


@contextmanager
def bar(*, shown: bool = True) -> Iterator[Callable[[int, int, str], None]]:
    """A bar that is drawn by calling it with (done, total, words), and is wiped at the end."""
    if not (shown and sys.stderr.isatty()):
        yield _draw_nothing
        return
    progress = _rich_bar()
    task = progress.add_task("", total=None, words="starting")

    def draw(done: int, total: int, words: str) -> None:
        progress.update(task, completed=done, total=total, words=words)

    with progress:
        yield draw


def _draw_nothing(done: int, total: int, words: str) -> None:
    pass


def _rich_bar() -> "RichProgress":
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    return Progress(
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[words]}", markup=False),
        console=console(stderr=True),
        transient=True,
        expand=True,
        refresh_per_second=10,
    )
