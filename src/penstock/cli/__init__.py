"""The command line `penstock`.

Each command is one file: it reads the arguments, calls the library, and prints a table or, with
`--json`, one JSON object. Commands import NumPy, torch and other large packages inside their
functions, so that `penstock --help` is fast.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType


def main() -> None:
    """Run the command line of this process; the console script `penstock` calls this function."""
    # Python allows only the main thread to set a signal handler.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _repeat_interrupt
    # The handler is set before this import, which takes most of the time that the program needs to
    # start.
    from penstock.cli.app import run

    run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: raise KeyboardInterrupt, or exit at once during an import.

    An exception during an import can be lost, or it can leave the import lock held. Every thread
    that imports would then wait forever. Files on disk are safe: stores survive a kill.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            sys.stderr.write("Interrupted: stopped by Ctrl-C.\n")
            sys.stderr.flush()
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _repeat_interrupt(ignored: "sys.UnraisableHookArgs") -> None:
    """Repeat a Ctrl-C that arrived where Python prints exceptions and continues.

    Such as in `__del__`, or in a function that is called when an object is garbage collected.
    """
    if not isinstance(ignored.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    # A little later, because an exception in this function would be printed too.
    again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    # No thread can start while Python ends, and then nothing continues.
    with suppress(RuntimeError):
        again.start()
