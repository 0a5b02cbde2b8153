"""The directory of a run, for one run at a time."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from penstock.errors import StoreBusyError, TrainError
from penstock.store.lock import locked
from penstock.train.world import World

__all__ = ["alone"]

# Where nothing can be written, a finished run is still there to be seen; and some disks of
# clusters have no locks.
_NO_LOCKS = {errno.EACCES, errno.EROFS, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


@contextmanager
def alone(output: Path, here: World) -> Iterator[None]:
    """Hold the output of a run, by the process that leads.

    Raises:
        TrainError: another run holds it; the two would write over each other's files.
    """
    with ExitStack() as stack:
        if here.leads:
            try:
                output.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(output))
            except StoreBusyError as error:
                raise TrainError(
                    f"Another process (its number is in {output / '.lock'}) trains into {output}. "
                    "Wait for it, or stop it; or name another output."
                ) from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        yield
