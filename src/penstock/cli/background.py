"""Work that Ctrl-C must be able to end."""

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_background"]

Result = TypeVar("Result")


def in_background(work: Callable[[], Result]) -> Result:
    """What `work()` returns or raises.

    Python hears Ctrl-C only between two steps of its main thread, and a native call that
    learns merges is one step of a minute. So the call gets a thread of its own, and the
    main thread waits where it can be interrupted; the thread ends with the process.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  (raised again in the calling thread)
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="work")
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if errors:
        raise errors[0]
    return results[0]
