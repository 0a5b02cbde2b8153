"""The command line: the same objects, typed in a shell.

Takes arguments, gives tables for people and one JSON object for programs. Commands only
parse and print; whatever they compute stands in the library. Heavy packages are imported
inside commands, so `penstock --help` answers at once.
"""

import os
import signal
import sys
import threading
from types import FrameType


def main() -> None:
    """Run the command line of this process; the console script `penstock`."""
    here = threading.current_thread() is threading.main_thread()  # which alone may say so
    if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    from penstock.cli.app import run

    run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: raise KeyboardInterrupt, except while modules load.

    There it would be lost, or leave the lock on imports held by nobody, for which every
    thread that imports would wait for ever. All that is on disk survives a sudden end.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            sys.stderr.write("Interrupted: stopped by Ctrl-C.\n")
            sys.stderr.flush()
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt
