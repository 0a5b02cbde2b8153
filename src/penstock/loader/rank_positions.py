"""Checks that all ranks begin at the same position of the same data.

    rank 0    load step-30    first batch: position 240 ─┐
                                                         ├─ compared: an error on both ranks
    rank 1    load step-60    first batch: position 480 ─┘

Ranks that load different checkpoints read some rows twice and others never, and no loss shows it.
So each rank reports its position at its first batch, and again at the first batch after it was
moved by `load_state_dict` or `seek`. Ranks that loaded nothing report too: otherwise, a rank that
found no checkpoint would not be noticed.

The reports go through the key-value store of the process group, and not through a collective. A
collective needs a device tensor with NCCL, must come in the same order as those of the model on
all ranks, and hangs if a rank does not join. The store works with every backend, and a rank waits
for reports of the others for 30 seconds at most. Then it warns and continues, and the rank that
reports last still compares all positions. So nothing hangs, and no difference is silent, also if
one rank alone reads a batch.
"""

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import get_worker_info

from penstock.digest import digest_json
from penstock.errors import ResumeError
from penstock.loader.state import State, explained

_WAIT_SECONDS = 30.0
_MOST_POLL_SECONDS = 0.1
_MOST_SHOWN = 4
_KEY = "penstock/positions"

# How often this process has reported for each order of data, by the digest of the order.
_reported: Counter[str] = Counter()


class RankPositions:
    """When one loader has to be compared with the loaders of the other ranks.

    Args:
        world_size: The number of ranks of the loader. If it is not that of the process group,
            nothing is compared: such a loader is for this rank alone, for other groups of ranks, or
            for a mesh in which some ranks may read nothing, such as stages of a pipeline.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._is_due, self._moved = True, False

    def moved(self) -> None:
        """Compare before the next batch, because the user has set the position of this rank."""
        self._is_due = self._moved = True

    def never(self) -> None:
        """Do not compare: the caller has computed one position for all ranks."""
        self._is_due = False

    def check(self, position: int, identity: Callable[[], State]) -> None:
        """Compare the position before the first batch; call it on the thread of the training loop.

        Args:
            position: The position of the next row.
            identity: Returns what determines the order of the data, the same on all ranks.

        Raises:
            ResumeError: the ranks are at different positions, or read different data.
        """
        # Not in a worker of a DataLoader: it shares the connection to the store with its parent.
        if not self._is_due or get_worker_info() is not None:
            return
        self._is_due = False
        store = _group_store(self._world_size)
        if store is not None:
            _compare(store, position, identity(), moved=self._moved)


def _group_store(world_size: int) -> Any:
    """Return the store of the process group; None if there is no group of `world_size` ranks."""
    if not torch.distributed.is_available() or torch.distributed.group.WORLD is None:
        return None
    # "fake" is a group of torch's own tests, whose other ranks do not exist.
    if torch.distributed.get_backend() == "fake":
        return None
    if world_size == 1 or torch.distributed.get_world_size() != world_size:
        return None
    return _get_default_store()  # None with MPI


def _compare(store: Any, position: int, identity: State, *, moved: bool) -> None:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    digest = digest_json(identity)
    number = _reported[digest]
    _reported[digest] += 1
    # Loaders of other data have other keys, so a validation loader of one rank is not taken for
    # the training loader of another. If orders differ that should be equal, the newest report of
    # the other rank shows it.
    keys = [f"{_KEY}/{digest}/{number}/{each}" for each in range(world_size)]
    store.set(f"{_KEY}/newest/{rank}", json.dumps({"digest": digest, "identity": identity}))
    store.set(keys[rank], json.dumps([position, moved]))
    if number > 1:  # all ranks that reported the last time have read the reports before that
        store.delete_key(f"{_KEY}/{digest}/{number - 2}/{rank}")
    missing = _wait(store, keys)
    found = {
        each: tuple(json.loads(store.get(keys[each])))
        for each in range(world_size)
        if each not in missing
    }
    if len({at for at, _ in found.values()}) > 1:
        raise ResumeError(
            "The ranks are at different positions of the data, so some rows would be read twice "
            f"and others never: {_positions(found)}. Save the state on one rank under a temporary "
            "name, rename the file, call torch.distributed.barrier() on all ranks, and then load "
            "this file on all of them."
        )
    if missing:
        other = next(filter(None, (_other_order(store, each, identity) for each in missing)), "")
        # At position 0, this may be a validation loader that only this rank reads.
        if other and moved and position:
            raise ResumeError(
                f"{other} So some rows would be read twice and others never. Give all ranks the "
                "same data and settings."
            )
        warnings.warn(
            f"{_ranks(missing)} did not come to the first batch within {_WAIT_SECONDS:.0f} seconds,"
            " so positions were not compared. They are as soon as a late rank comes. "
            + (other and f"{other} ")
            + "To read on one rank alone, use loader[step], or give the loader rank=0 and "
            "world_size=1.",
            stacklevel=2,
        )


def _wait(store: Any, keys: list[str]) -> list[int]:
    """Wait until all ranks have reported; return those that have not after 30 seconds."""
    # Store.wait() would not return for Ctrl-C.
    deadline, seconds = time.monotonic() + _WAIT_SECONDS, 0.001
    while not store.check(keys):
        if time.monotonic() > deadline:
            return [rank for rank, key in enumerate(keys) if not store.check([key])]
        time.sleep(seconds)
        seconds = min(2 * seconds, _MOST_POLL_SECONDS)
    return []


def _other_order(store: Any, rank: int, identity: State) -> str:
    """Return how the newest order of data on a rank differs from `identity`; "" if not known."""
    key = f"{_KEY}/newest/{rank}"
    newest = json.loads(store.get(key)) if store.check([key]) else None
    # An order that this rank has read too is that of another loader, such as for validation.
    if newest is None or newest["digest"] in _reported:
        return ""
    return (
        f"Rank {rank} reads the data in another order than rank {torch.distributed.get_rank()}: "
        f"{explained(identity, newest['identity'])}."
    )


def _positions(found: dict[int, Any]) -> str:
    """Return which ranks are at which position: `rank 0 is at 240, ranks 1, 2 at 480`."""
    ranks: dict[Any, list[int]] = {}
    for rank, at in found.items():
        ranks.setdefault(at, []).append(rank)
    shown = [
        f"{_ranks(each).lower()} {'is' if len(each) == 1 else 'are'} at position {position:,}"
        + ("" if moved else " (without load_state_dict or seek)")
        for (position, moved), each in ranks.items()
    ]
    more = f", and {len(shown) - _MOST_SHOWN:,} more" if len(shown) > _MOST_SHOWN else ""
    return ", ".join(shown[:_MOST_SHOWN]) + more


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_SHOWN]))
    more = f" and {len(numbers) - _MOST_SHOWN:,} more" if len(numbers) > _MOST_SHOWN else ""
    return f"Rank{'s' * (len(numbers) > 1)} {shown}{more}"
