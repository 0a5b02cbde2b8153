"""A run as people watch it: one line that is drawn anew in a terminal, else a line now and then.

step 1,200/4,800  loss 5.3121  val 5.4410  6,210 tok/s  wait 0.1%  1.2 GB  ETA 9:48

Needs rich for the first, and nothing for the second.
"""

import re
import sys
import time
from typing import Any, TextIO

from penstock.train.job import Report

__all__ = ["Display", "report_line"]

_EVERY_SECONDS = 10.0  # between two lines, where there is no terminal
_DRAWN_SECONDS = 0.2
# What a model writes may be anything; what commands a terminal is spelled out.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Display:
    """Shows reports and remarks on a stream; call it with either.

    With rich and a terminal, the newest report stays on the last line. Otherwise lines are
    printed, at first soon and then every ten seconds.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live: Any = _live(self._stream)
        self._shown = -1e9
        self._last: Report | None = None

    def __call__(self, told: Report | str) -> None:
        """Show a report, if it is time for one, or a remark, at once."""
        if isinstance(told, str):
            self._write(_HARMFUL.sub(lambda found: ascii(found[0])[1:-1], told))
            return
        self._last = told
        now = time.monotonic()
        soon = _DRAWN_SECONDS if self._live is not None else min(_EVERY_SECONDS, told.now.step)
        if now - self._shown < soon and told.now.step != told.now.steps:
            return
        self._shown = now
        if self._live is not None:
            self._live.update(report_line(told), refresh=True)
        else:
            self._write(report_line(told))

    def _write(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, soft_wrap=True)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the last line where it is."""
        if self._live is not None:
            if self._last is not None:
                self._live.update(report_line(self._last), refresh=True)
            self._live.stop()


def report_line(report: Report) -> str:
    """How a run stands, in one line."""
    now = report.now
    of = "" if now.steps is None else f"/{now.steps:,}"
    parts = [f"step {now.step:,}{of}", f"loss {now.loss:.4f}"]
    if now.val_loss is not None:
        parts.append(f"val {now.val_loss:.4f}")
    parts.append(f"{report.tokens_per_second:,.0f} tok/s")
    if report.mfu is not None:
        parts.append(f"MFU {report.mfu:.1%}")
    parts += [f"wait {report.waiting:.1%}", f"{report.memory / 1e9:.1f} GB"]
    if report.remaining is not None and report.remaining < 1e9:
        minutes, seconds = divmod(round(report.remaining), 60)
        parts.append(f"ETA {minutes}:{seconds:02d}")
    return "  ".join(parts)


def _live(stream: TextIO) -> Any:
    """A line of rich's that is drawn anew; None without rich or a terminal."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return None
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    live = Live(console=console, auto_refresh=False)
    live.start()
    return live
