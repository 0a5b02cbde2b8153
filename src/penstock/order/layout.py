"""From the settings of a plan to the object that computes its order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.digest import digest_json
from penstock.errors import PlanError
from penstock.order import arguments
from penstock.order.arguments import Caps, StageArguments
from penstock.order.epochs import EpochOrder
from penstock.order.schedule import Schedule, Stage, StartingPoint
from penstock.order.shuffle import Block, Domain, Mode, Sources, needs_parts
from penstock.order.weighted import Mixture, MixtureAfterEpochs
from penstock.rows.protocol import Rows, Settings

Layout = Mixture | EpochOrder


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """Everything that an order depends on."""

    sources: Mapping[str, Rows]
    shuffle: Mode | Block
    seed: int
    caps: Caps | None
    stages: Sequence[StageArguments]

    @property
    def is_weighted(self) -> bool:
        """Whether sources are drawn by weights."""
        return self.stages[-1].sources is None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources."""
        return tuple(self.sources)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each source."""
        return tuple(map(len, self.sources.values()))

    def lay_out(self) -> Layout:
        """Return the order of these settings.

        Raises:
            PlanError: some of them contradict each other, or the sources.
        """
        if not self.is_weighted and self.caps is not None:
            raise PlanError(
                f"max_epochs={self.caps.epochs!r} needs weights=. Without weights, all "
                "sources have the same number of epochs; pass it to the loader: "
                "Loader(plan, …, epochs=2)."
            )
        if not self.is_weighted:
            arguments.refuse_empty(self.names, self.sizes)
            return EpochOrder(self._domains())
        schedule = Schedule(
            arguments.read_weights(self.stages, self.names, self.sizes),
            caps=self._cap_rows(),
            exhausted=self.caps.then if self.caps else "error",
        )
        return Mixture(schedule, self._domains())

    def continued(self, order: Layout) -> Mixture:
        """Return the order that equals `order` before these stages, and continues with them."""
        stages = arguments.read_weights(self.stages, self.names, self.sizes)
        start = stages[0].start
        if isinstance(order, MixtureAfterEpochs) and start <= order.start:
            order = order.before
        if isinstance(order, EpochOrder) and order.num_sources > 1:
            counts = order.counts(start) + [0] * (len(self.names) - order.num_sources)
            origin = StartingPoint(start, counts, [0] * len(counts))
            return MixtureAfterEpochs(order, Schedule(stages, origin=origin), self._domains())
        # A source alone, without weights, is in the same order as with them.
        before = order.schedule if isinstance(order, Mixture) else Schedule([Stage(0, [1])])
        schedule = before.amended(stages, self._cap_rows())
        if isinstance(order, MixtureAfterEpochs):
            return MixtureAfterEpochs(order.before, schedule, self._domains())
        return Mixture(schedule, self._domains())

    def _cap_rows(self) -> list[int | None] | None:
        return arguments.cap_rows(self.caps, self.names, self.sizes) if self.caps else None

    def _domains(self) -> Sources:
        domains = [
            Domain(len(source), self._part_rows(name, source) or ())
            for name, source in self.sources.items()
        ]
        return Sources(self.names, domains, self.shuffle, self.seed)

    def _part_rows(self, name: str, source: Rows) -> list[int] | None:
        """Return the rows of each part of a source, if the order depends on them."""
        if not needs_parts(self.shuffle):
            return None
        # Blocks of rows that have no parts: one block.
        if source.part_rows is None and self.shuffle != "part":
            return [len(source)]
        return arguments.part_rows_of(name, source, len(source))

    def describe(self, name: str, source: Rows) -> Settings:
        """Return what the order depends on of one source, as JSON."""
        described: Settings = {"name": name, "rows": len(source), "digest": source.digest}
        # Only in some modes, the order depends on the sizes of parts.
        if (parts := self._part_rows(name, source)) is not None:
            described["parts"] = digest_json(parts)
        return described
