"""What a page is about: stores or token files, and perhaps the run that reads them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock.errors import PlanError
from penstock.formats.open import token_files_at
from penstock.formats.token_files import Member, TokenFiles
from penstock.paths import StoreUrl, store_path
from penstock.store.reader import TokenStore
from penstock.store.sides import open_stores, stores_at

if TYPE_CHECKING:
    from penstock.inspect.forecast import Forecast
    from penstock.inspect.runs import OpenedRun, RunSteps

_ROWS_OF_A_STEP = 8  # if the recipe leaves them to the device
_RUN_FILE = "run.json"


@dataclass(frozen=True)
class Subject:
    """What a page is about."""

    name: str
    corpora: Mapping[str, Member]
    """The stores and token files, by name."""
    run: "OpenedRun | None" = None
    """The recipe or run that reads them; None for a store."""
    tokenizer: object = None
    """The tokenizer of token files, or of a store whose tokenizer is not known here."""

    @cached_property
    def steps(self) -> "RunSteps":
        """The steps of the run; of one epoch if its end is not known.

        They have eight rows each if the recipe leaves that to the device.
        """
        from penstock.inspect.runs import RunSteps
        from penstock.order.steps import Steps

        assert self.run is not None  # a store has no steps
        found = self.run.steps
        if found.total is not None:
            return found
        try:
            start, stop = found.span(found.first)
        except PlanError:
            start, stop = 0, _ROWS_OF_A_STEP
        total = max(1, self.num_rows // (stop - start))
        return RunSteps(Steps(stop - start), total=total, limit=self.run.plan.end)

    @cached_property
    def forecast(self) -> "Forecast":
        """What the run would read."""
        from penstock.inspect.forecast import forecast

        assert self.run is not None
        return forecast(self.run, measured=False)

    @property
    def num_rows(self) -> int:
        """The rows of the run; of one epoch of all sources if its end is not known."""
        assert self.run is not None
        end = self.run.steps.end
        return min(sum(self.run.plan.sizes), self.run.plan.end) if end is None else end


def open_subject(
    source: "str | os.PathLike[str] | TokenStore | TokenFiles | OpenedRun",
    *,
    tokenizer: object = None,
    changes: Mapping[str, Any] | None = None,
    log: Callable[[str], None] | None = None,
) -> Subject:
    """Open a store, token files, a recipe or the directory of a run.

    Args:
        source: The path or URL; or an object that is open already.
        tokenizer: The tokenizer, if it is not known on this machine.
        changes: Settings of a recipe that are changed first, by dotted names.
        log: Called with a line of text, for example before text is tokenized.
    """
    if isinstance(source, TokenStore | TokenFiles):
        return Subject(str(source.path), {str(source.path): source}, None, tokenizer)
    if not isinstance(source, str | os.PathLike):
        return _of_run(source, "run", tokenizer)
    path = store_path(source)
    if names_run(source):
        # Imported here, because it imports torch, and a store does not need it.
        from penstock.inspect.runs import open_run

        return _of_run(open_run(str(source), dict(changes or {}), log), str(source), tokenizer)
    if (files := token_files_at(source, tokenizer=tokenizer)) is not None:
        return Subject(str(source), {str(path): files}, None, tokenizer)
    sides = stores_at(path)
    stores = open_stores([*sides.values()])
    names = [side or str(source) for side in sides]
    return Subject(str(source), dict(zip(names, stores, strict=True)), None, tokenizer)


def names_run(source: str | os.PathLike[str]) -> bool:
    """Return whether a path is that of a recipe, or of the directory of a run."""
    path = store_path(source)
    return not isinstance(path, StoreUrl) and (
        path.suffix == ".toml" or (path / _RUN_FILE).is_file()
    )


def _of_run(run: "OpenedRun", name: str, tokenizer: object) -> Subject:
    corpora: dict[str, Member] = {}
    known: set[str] = set()
    for source, rows in run.plan.sources.items():
        members = rows.stream.members if rows.stream is not None else ()
        for number, member in enumerate(members):
            # Two sources may read one store, in rows of different kinds.
            if member.digest not in known:
                known.add(member.digest)
                corpora[f"{source}, store {number + 1}" if len(members) > 1 else source] = member
    return replace(Subject(name, corpora, run), tokenizer=tokenizer or run.tokenizer)
