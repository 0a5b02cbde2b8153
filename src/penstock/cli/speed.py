"""How fast a store is read on this machine, and what that is worth.

Turns of int64 and of narrow ids alternate, so that a noisy second hits both; the medians
count. What a GPU needs is arithmetic: training takes about 6 floating point operations for
each parameter and token, and a GPU that does half of what an H100 is sold for is a good one.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.loader.loader import Loader

__all__ = ["GPU_FLOPS", "NEEDS", "UTILISATION", "Need", "Speed", "measure_speed"]

GPU_FLOPS = 989e12
"""Operations a second that an H100 is specified for: bfloat16, dense."""
UTILISATION = 0.5
"""The share of them that a well tuned training run gets."""
_FLOPS_A_PARAMETER = 6  # and token: 2 forward, 4 backward

_NUM_TURNS = 3
_NUM_RESUMES = 20
_WARM_SHARE = 0.1  # of a turn: what was made ahead while the other kind was read


@dataclass(frozen=True, slots=True)
class Need:
    """A model on some GPUs."""

    model: str
    num_parameters: float
    num_gpus: int

    @property
    def tokens_per_second(self) -> float:
        """How many tokens all of its GPUs together take.

        >>> round(Need("GPT-2", 124e6, 1).tokens_per_second)
        664651
        """
        flops = self.num_gpus * GPU_FLOPS * UTILISATION
        return flops / (_FLOPS_A_PARAMETER * self.num_parameters)


NEEDS = (
    Need("GPT-2, 124M", 124e6, 1),
    Need("GPT-2, 124M", 124e6, 8),
    Need("1B", 1e9, 8),
    Need("8B", 8e9, 8),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What was measured."""

    store: Path
    num_tokens: int
    num_rows: int
    length: int
    batch_size: int
    wide: float
    """Tokens a second as int64 tensors."""
    narrow: float
    """Tokens a second, ids as narrow as they are stored."""
    first_batch: float
    """Seconds from opening the store to the first batch."""
    resumes: tuple[float, ...]
    """Seconds from a state to its next batch, at places all over a run."""
    memory_bytes: int | None
    """How far anonymous memory grew; None where the system does not say."""

    def spell(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "store": str(self.store),
            "num_tokens": self.num_tokens,
            "num_rows": self.num_rows,
            "length": self.length,
            "batch_size": self.batch_size,
            "tokens_per_second": {"int64": round(self.wide), "narrow": round(self.narrow)},
            "first_batch_seconds": self.first_batch,
            "resume_seconds": {
                "median": statistics.median(self.resumes),
                "worst": max(self.resumes),
            },
            "memory_bytes": self.memory_bytes,
            "needs": [
                {
                    "model": need.model,
                    "num_parameters": round(need.num_parameters),
                    "num_gpus": need.num_gpus,
                    "tokens_per_second": round(need.tokens_per_second),
                    "headroom": self.wide / need.tokens_per_second,
                }
                for need in NEEDS
            ],
        }


def measure_speed(
    path: Path,
    *,
    length: int,
    batch_size: int,
    seconds: float,
    tell: Callable[[int, int, str], None] = lambda *_: None,
) -> Speed:
    """Read a store for about that many seconds.

    Args:
        path: The directory of the store.
        length: Tokens in a row.
        batch_size: Rows in a batch.
        seconds: How long to read, in all.
        tell: Called with (done, total, words) as it goes.
    """
    from penstock.loader.loader import Loader
    from penstock.rows.windows import Windows
    from penstock.store.reader import TokenStore

    before = anonymous_bytes()
    begun = time.perf_counter()
    rows = Windows(TokenStore(path), length)
    wide = Loader(rows, batch_size)
    batches = {"int64": iter(wide)}
    next(batches["int64"])
    first_batch = time.perf_counter() - begun
    batches["narrow"] = iter(Loader(rows, batch_size, narrow=True))
    rates: dict[str, list[float]] = {"int64": [], "narrow": []}
    peak = before or 0
    for turn in range(2 * _NUM_TURNS):
        kind = "narrow" if turn % 2 else "int64"
        tell(turn, 2 * _NUM_TURNS, f"reading {kind}")
        count, took = _read(batches[kind], seconds / (2 * _NUM_TURNS))
        rates[kind].append(count * batch_size * length / took)
        peak = max(peak, anonymous_bytes() or 0)
    del batches  # their threads end
    resumes = tuple(_resumes(wide, Loader(rows, batch_size), len(rows)))
    return Speed(
        store=path,
        num_tokens=rows.stream.num_tokens,
        num_rows=len(rows),
        length=length,
        batch_size=batch_size,
        wide=statistics.median(rates["int64"]),
        narrow=statistics.median(rates["narrow"]),
        first_batch=first_batch,
        resumes=resumes,
        memory_bytes=None if before is None else peak - before,
    )


def _read(batches: Iterator[Any], seconds: float) -> tuple[int, float]:
    """Batches read in that time, and the time that it really was."""
    warm = time.perf_counter() + _WARM_SHARE * seconds
    while time.perf_counter() < warm:
        next(batches)
    count = 0
    begun = now = time.perf_counter()
    while now - begun < seconds:
        next(batches)
        count += 1
        now = time.perf_counter()
    return count, now - begun


def _resumes(loader: "Loader", fresh: "Loader", num_rows: int) -> Iterator[float]:
    """Seconds from a state to its next batch, from the first row to the thousandth epoch."""
    for number in range(_NUM_RESUMES):
        loader.seek(1_000 * num_rows * number // (_NUM_RESUMES - 1))
        state = json.loads(json.dumps(loader.state_dict()))
        begun = time.perf_counter()
        fresh.load_state_dict(state)
        for _ in islice(fresh, 1):
            yield time.perf_counter() - begun


def anonymous_bytes() -> int | None:
    """Memory of this process that no file stands behind; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:  # macOS and Windows
        return None
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    return next(found, None)
