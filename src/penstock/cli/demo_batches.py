"""The second half of the demo: stores to batches."""

import json
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.terminal import write
from penstock.cli.units import duration_text

if TYPE_CHECKING:
    from penstock.loader.loader import Loader
    from penstock.order.plan import Plan
    from penstock.store.reader import TokenStore
    from penstock.tokenize.tokenizer import Tokenizer

__all__ = ["mixture", "show_batch", "show_resume", "show_speed", "show_training"]

_LENGTH = 64
_BATCH = 16
_SHOWN_TOKENS = 9
_SECONDS = 1.0


def mixture(stores: "dict[str, TokenStore]") -> "Plan":
    """Three rows of code for each of prose, shuffled; the plan is shown."""
    from penstock.order.plan import Plan
    from penstock.rows.windows import Windows

    sources = {name: Windows(store, _LENGTH) for name, store in stores.items()}
    plan = Plan(sources, weights={"code": 3, "prose": 1}, seed=17)
    write(str(plan))
    return plan


def show_batch(plan: "Plan", tokenizer: "Tokenizer") -> None:
    """The first batch: what each place sees, and what it is to predict."""
    batch = _loader(plan, ids=True)[0]
    inputs, targets = batch["inputs"], batch["targets"]
    write(f"inputs {tuple(inputs.shape)} {inputs.dtype}, targets {tuple(targets.shape)}")
    for row in (0, 1):
        source = plan.names[int(batch["source"][row])]
        write(f"\nrow {row}: {source}, sample {int(batch['sample'][row]):,}")
        for name, ids in (("inputs", inputs[row]), ("targets", targets[row])):
            shown = " ".join(_spelled(tokenizer, ids[:_SHOWN_TOKENS].tolist()))
            write(f"  {name:<8} {shown} …")


def _spelled(tokenizer: "Tokenizer", ids: list[int]) -> list[str]:
    """Each token in quotes, spaces and line ends to be seen."""
    return [json.dumps(tokenizer.decode([each]).decode(errors="replace")) for each in ids]


def show_speed(plan: "Plan") -> None:
    """How many tokens a second come out on this machine, and how soon the first do."""
    begun = time.perf_counter()
    batches = iter(_loader(plan))
    next(batches)
    first = time.perf_counter() - begun
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < _SECONDS:
        for _ in islice(batches, 100):
            count += 1
    tokens = count * _BATCH * _LENGTH / (time.perf_counter() - begun)
    write(f"first batch after {duration_text(first)}, then {tokens / 1e6:,.0f} M tokens/s")


def show_resume(plan: "Plan") -> None:
    """Stop after 1,000 steps, go on elsewhere with two ranks: the rows are the same."""
    whole = _loader(plan)
    for _ in islice(whole, 1_000):
        pass
    state = json.dumps(whole.state_dict())
    write(f"the state after 1,000 steps: {len(state):,} bytes of JSON")
    ranks = [_loader(plan, rank=rank, world_size=2) for rank in (0, 1)]
    for each in ranks:
        each.load_state_dict(json.loads(state))
    num_steps = 0
    for batch, *halves in zip(islice(whole, 200), *ranks, strict=False):
        _refuse_difference(batch, halves)
        num_steps += 1
    write(f"two ranks went on from it: {num_steps} steps, every row as one process reads it")


def show_training(store: "TokenStore", output: Path, seconds: float) -> None:
    """A small GPT-2 on one of the stores, for so long."""
    from penstock.train.demo import demo_run
    from penstock.train.display import Display

    display = Display()
    try:
        outcome = demo_run(store, output, seconds=seconds, tell=display)
    finally:
        display.close()
    now = outcome.now
    write(f"{now.step:,} steps, {now.tokens:,} tokens, loss {now.loss:.2f} (it begins at 10.8)")
    write(f"the curve: {output / 'curve.svg'}")


def _loader(plan: "Plan", **options: Any) -> "Loader":
    from penstock.loader.loader import Loader

    return Loader(plan, global_batch_size=_BATCH, **options)


def _refuse_difference(batch: dict[str, Any], halves: list[dict[str, Any]]) -> None:
    import torch

    joined = torch.cat([half["inputs"] for half in halves])
    if not torch.equal(joined, batch["inputs"]):
        raise AssertionError("Two ranks did not read what one process reads; please report it.")
