"""Several datasets as one map-style dataset.

    datasets   arc  ████████     gsm8k  ████     mmlu  █
    index_map  (0, 5) (1, 2) (0, 7) (0, 0) (2, 0) (1, 3) …     computed, not stored
    item i     the example at index_map[i], and where it came from

The datasets are used as they are: nothing is copied, and an example is read when it is asked
for. What is handed out is a new dict, so that the user's own stay as they were.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem, index, itemgetter, or_
from typing import Any, NamedTuple, overload

import numpy as np
from torch.utils.data import Dataset

from penstock.errors import PlanError, SourceError
from penstock.integrations.blend import Blend, blend_of
from penstock.integrations.collate import default_collate_fn, stacked
from penstock.integrations.shares import Lengths, Weights, whole_number
from penstock.order.arguments import quoted

__all__ = ["Drawn", "IndexMap", "MultiplexDataset", "Place"]

Named = Sequence[tuple[str, Any]]

_ADDED = ("dataset_name", "dataset_idx")
_CHUNK = 8_192


class Drawn(NamedTuple):
    """Examples to read, as the order has them: which dataset, and which example of it."""

    sources: list[int]
    samples: list[int]


@dataclass(slots=True)
class Place:
    """Where a run is: the next position of its order, in which epoch, and where that began."""

    epoch: int = 0
    start: int = 0
    position: int = 0


class MultiplexDataset(Dataset[dict[str, Any]]):
    """Named datasets in one order: item i is an example with `dataset_name` and `dataset_idx`.

    The length is the number of all examples, for every strategy. A new order each epoch and
    shares that change need a loader: `create_multiplex_dataloader`.

    Args:
        datasets: Pairs of a name and a sized sequence of dicts: a list, a Hugging Face dataset,
            anything with `len()` and `[]`. Where there is `__getitems__`, many are read at once.
        sampling_strategy: "proportional", "uniform" or "weighted".
        sampling_weights: Shares in the order of `datasets`, or by name.
        shuffle_seed: Another seed, another order.
        schedule: Other weights from some number of examples of the run on.
        lengths: Makes weights shares of tokens: a function of an example, or the numbers of all
            examples by dataset. See `penstock.integrations.blend` for what it promises.

    >>> dataset = MultiplexDataset([("a", [{"text": "x"}, {"text": "y"}]), ("b", [{"n": 1}])])
    >>> dataset[0], dataset.index_map[0]
    ({'text': 'y', 'dataset_name': 'a', 'dataset_idx': 0}, (0, 1))
    """

    def __init__(
        self,
        datasets: Named,
        sampling_strategy: str = "proportional",
        sampling_weights: Weights | None = None,
        shuffle_seed: int = 42,
        *,
        schedule: Mapping[int, Weights] | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        names, self._rows = _checked(datasets)
        self.blend: Blend = blend_of(
            names,
            self._rows,
            strategy=sampling_strategy,
            weights=sampling_weights,
            seed=whole_number("shuffle_seed", shuffle_seed),
            schedule=schedule,
            lengths=lengths,
        )
        """The order; a loader whose weights are set anew puts another here."""
        self.place = Place()
        """Where the loader of this dataset is."""
        self._added = [
            dict(zip(_ADDED, (name, number), strict=True)) for number, name in enumerate(names)
        ]
        self._in_memory = all(type(rows) in (list, tuple) for rows in self._rows)

    @property
    def datasets(self) -> list[tuple[str, Any]]:
        """The pairs that were given, the same objects."""
        return list(zip(self.blend.names, self._rows, strict=True))

    @property
    def sampling_strategy(self) -> str:
        """The strategy in force."""
        return self.blend.strategy

    @property
    def index_map(self) -> "IndexMap":
        """`(dataset_idx, example_idx)` of every item, computed when asked for."""
        return IndexMap(self.blend)

    def __len__(self) -> int:
        return self.blend.total

    def __getitem__(self, number: int) -> dict[str, Any]:
        source, sample = self.index_map[index(number)]
        return self.read([source], [sample])[0]

    def __getitems__(self, asked: Drawn | list[int]) -> list[dict[str, Any]]:
        """Many items at once; a DataLoader asks for a batch this way."""
        if isinstance(asked, Drawn):
            return self.read(*asked)
        pairs = [self.index_map[number] for number in asked]
        return self.read([source for source, _ in pairs], [sample for _, sample in pairs])

    def read(self, sources: list[int], samples: list[int]) -> list[dict[str, Any]]:
        """The examples of these datasets and numbers, each with where it came from.

        Raises:
            SourceError: an example is no dict, or already has what is added to it.
        """
        return self._merged(self._found(sources, samples), sources, samples)

    def _merged(
        self, found: list[Any], sources: list[int], samples: list[int]
    ) -> list[dict[str, Any]]:
        added = self._added
        try:
            made: list[dict[str, Any]] = list(map(or_, found, [added[s] for s in sources]))
            # A key that is there already does not make a dict longer.
            if sum(map(len, made)) == sum(map(len, found)) + len(_ADDED) * len(found):
                return made
        except TypeError:
            pass
        where = zip(found, sources, samples, strict=True)
        return [self._told(example, source, sample) for example, source, sample in where]

    def columns(self, sources: list[int], samples: list[int]) -> dict[str, Any]:
        """`default_collate_fn` of these examples, without making a dict for each of them."""
        found = self._found(sources, samples)
        first = found[0]
        # As many keys as the first has, and all of its own: then every example has the same. Plain
        # dicts alone: asking a defaultdict for a key that it has not would change it.
        alike = set(map(type, found)) == {dict} and len(first) > 1
        alike = alike and not any(key in first for key in _ADDED)
        if alike and sum(map(len, found)) == len(first) * len(found):
            try:
                values = list(zip(*map(itemgetter(*first), found), strict=True))
            except KeyError:
                return default_collate_fn(self._merged(found, sources, samples))
            made = {key: stacked(list(each)) for key, each in zip(first, values, strict=True)}
            names = self.blend.names
            return made | {"dataset_name": [names[s] for s in sources], "dataset_idx": sources}
        return default_collate_fn(self._merged(found, sources, samples))

    def get_dataset_stats(self) -> dict[str, Any]:
        """Names, sizes, shares, and the examples of the run so far, over all ranks.

        `sampling_percentage` is of the weights in force. `asked` is the integral of the weights
        up to the loader's position in its order, in examples, and `delivered` is how many came;
        see `docs/mixing.md` for how near they are.
        """
        blend, position = self.blend, self.place.position
        told = zip(
            blend.names,
            blend.sizes,
            blend.shares(position),
            blend.asked(position),
            blend.delivered(position),
            strict=True,
        )
        return {
            "num_datasets": len(blend.names),
            "total_examples": blend.total,
            "sampling_strategy": blend.strategy,
            "datasets": [
                {
                    "name": name,
                    "size": size,
                    "sampling_percentage": 100 * share,
                    "asked": asked,
                    "delivered": delivered,
                }
                for name, size, share, asked, delivered in told
            ],
        }

    def _found(self, sources: list[int], samples: list[int]) -> list[Any]:
        """The examples as their datasets have them."""
        if self._in_memory:
            return list(map(getitem, map(self._rows.__getitem__, sources), samples))
        return self._gathered(sources, samples)

    def _gathered(self, sources: list[int], samples: list[int]) -> list[Any]:
        """Examples of datasets that may be quicker with many at once."""
        found: list[Any] = [None] * len(sources)
        for source in set(sources):
            places = [place for place, each in enumerate(sources) if each == source]
            wanted = [samples[place] for place in places]
            rows = self._rows[source]
            many = getattr(rows, "__getitems__", None)
            items = many(wanted) if many else [rows[number] for number in wanted]
            for place, item in zip(places, items, strict=True):
                found[place] = item
        return found

    def _told(self, example: Any, source: int, sample: int) -> dict[str, Any]:
        """One example, checked with all the care that the quick way leaves out."""
        name = self.blend.names[source]
        if not isinstance(example, Mapping):
            raise SourceError(
                f'Example {sample:,} of "{name}" is a {type(example).__name__}; examples are '
                'dicts, so that the dataset\'s name can be told with them. Wrap it: {"text": …}.'
            )
        taken = [key for key in _ADDED if key in example]
        if taken:
            raise SourceError(
                f'Example {sample:,} of "{name}" already has {taken[0]!r}, which is where its '
                "dataset is told. Rename that key in your examples."
            )
        return {**example, **self._added[source]}


class IndexMap(Sequence[tuple[int, int]]):
    """`(dataset_idx, example_idx)` by item, as a list would have them, without the list."""

    def __init__(self, blend: Blend) -> None:
        self._blend = blend

    def __len__(self) -> int:
        return self._blend.total

    @overload
    def __getitem__(self, number: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, number: slice) -> list[tuple[int, int]]: ...

    def __getitem__(self, number: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        if isinstance(number, slice):
            return self._pairs(range(len(self))[number])
        place = index(number)
        if not -len(self) <= place < len(self):
            raise IndexError(f"There is no item {place:,}; there are {len(self):,}.")
        return self._pairs([place % len(self)])[0]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self), _CHUNK):
            yield from self[start : start + _CHUNK]

    def _pairs(self, places: Sequence[int]) -> list[tuple[int, int]]:
        located = self._blend.order.locate(np.array(places, dtype=np.int64))
        return list(zip(located[0].tolist(), located[2].tolist(), strict=True))


def _checked(datasets: Any) -> tuple[list[str], list[Any]]:
    """The names and the rows, if they can be mixed."""
    try:
        pairs = [(name, rows) for name, rows in datasets]
    except (TypeError, ValueError):
        raise PlanError(
            'datasets is a list of pairs, each a name and its examples: [("arc", arc_data), …].'
        ) from None
    if not pairs:
        raise PlanError("datasets is empty; give at least one pair of a name and its examples.")
    names = [name for name, _ in pairs]
    for name, rows in pairs:
        if not isinstance(name, str) or not name:
            raise PlanError(f"A dataset is called {name!r}; a name is a string, and not empty.")
        _check_rows(name, rows)
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise PlanError(f"Two datasets are called {quoted(twice)}; give each its own name.")
    return names, [rows for _, rows in pairs]


def _check_rows(name: str, rows: Any) -> None:
    if isinstance(rows, Mapping):
        keys = ", ".join(str(key) for key in list(rows)[:5])
        raise PlanError(
            f'Dataset "{name}" is a {type(rows).__name__} with the keys {keys}; examples are '
            "numbered from 0. Choose one of its splits, or list its values."
        )
    sized = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if not sized or isinstance(rows, str | bytes):
        raise PlanError(
            f'Dataset "{name}" is a {type(rows).__name__}; a list of dicts, a Hugging Face dataset '
            "or anything with len() and [] can be mixed. Make a list of it."
        )
    if not len(rows):
        raise PlanError(f'Dataset "{name}" is empty. Leave it out.')
