"""Several datasets as one map-style dataset.

    datasets   arc  ████████     gsm8k  ████     mmlu  █
    index_map  (0, 5) (1, 2) (0, 7) (0, 0) (2, 0) (1, 3) …     computed, not stored
    item i     the example at index_map[i], with the name and number of its dataset

The datasets are not copied, and an example is read when it is requested. Every returned example
is a new dict, so the examples of the user never change.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import getitem, index, or_
from typing import Any, NamedTuple, Protocol, SupportsIndex, overload, runtime_checkable

import numpy as np
from torch.utils.data import Dataset

from penstock.errors import PlanError, SourceError
from penstock.integrations.multiplex.collate import Example, collate_same_keys, default_collate_fn
from penstock.integrations.multiplex.mixing import Mixing, Weights, new_mixing, whole_number
from penstock.integrations.multiplex.run import MultiplexRun
from penstock.order.arguments import quoted

__all__ = ["BatchRequest", "Examples", "IndexMap", "Lengths", "MultiplexDataset"]

_ADDED = ("dataset_name", "dataset_idx")
_CHUNK = 8_192


@runtime_checkable
class Examples(Protocol):
    """A dataset: a list of dicts, a Hugging Face dataset, or a similar class."""

    def __len__(self) -> int:
        """The number of examples, which must not change."""
        ...

    def __getitem__(self, number: int, /) -> Any:
        """One example: a dict."""
        ...


Lengths = Callable[[Any], int] | Mapping[str, Sequence[int]] | Sequence[Sequence[int]]


class BatchRequest(NamedTuple):
    """The examples of one batch: the numbers of their datasets, and their numbers in these."""

    sources: list[int]
    samples: list[int]


class MultiplexDataset(Dataset[Example]):
    """Named datasets in one order: item i is an example with `dataset_name` and `dataset_idx`.

    The length is the number of all examples, for every strategy. For a new order in each epoch,
    or weights that change, use a loader: `create_multiplex_dataloader`.

    Args:
        datasets: Pairs of a name and a sized sequence of dicts: a list, a Hugging Face dataset,
            or any object with `len()` and `[]`. If it has `__getitems__`, that is called once
            per batch.
        sampling_strategy: "proportional", "uniform" or "weighted".
        sampling_weights: Shares in the order of `datasets`, or by name.
        shuffle_seed: A different seed gives a different order.
        schedule: `{10_000: [0.2, 0.8]}`: other weights from example 10,000 of the run on.
        lengths: Makes weights shares of tokens: a function that returns the tokens of an example,
            or the token counts of all examples by dataset. `penstock.integrations.multiplex.mixing`
            describes the guarantee.

    >>> dataset = MultiplexDataset([("a", [{"text": "x"}, {"text": "y"}]), ("b", [{"n": 1}])])
    >>> dataset[0], dataset.index_map[0]
    ({'text': 'y', 'dataset_name': 'a', 'dataset_idx': 0}, (0, 1))
    """

    def __init__(
        self,
        datasets: Sequence[tuple[str, Examples]],
        sampling_strategy: str = "proportional",
        sampling_weights: Weights | None = None,
        shuffle_seed: int = 42,
        *,
        schedule: Mapping[int, Weights] | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        names, self._rows = _check_datasets(datasets)
        sizes, seed = list(map(len, self._rows)), whole_number("shuffle_seed", shuffle_seed)
        mixing = new_mixing(names, sizes, sampling_strategy, sampling_weights, seed)
        if lengths is not None:
            if not mixing.stages:
                raise PlanError(
                    "lengths= makes weights shares of tokens, but a proportional loader has no "
                    "weights: it reads every example once per epoch. Pass sampling_weights, or "
                    'sampling_strategy="uniform".'
                )
            mixing = replace(mixing, num_tokens=_token_counts(lengths, names, self._rows))
        mixing = mixing.scheduled(schedule)
        mixing.order  # noqa: B018  (raises errors now, not at the first batch)
        self.run = MultiplexRun(mixing)
        """The current order and position. Only the loader of this dataset changes it."""
        self._added = [dict(zip(_ADDED, (n, i), strict=True)) for i, n in enumerate(names)]
        self._in_memory = all(type(rows) in (list, tuple) for rows in self._rows)

    @property
    def datasets(self) -> list[tuple[str, Examples]]:
        """The pairs that were passed; the datasets are the same objects."""
        return list(zip(self.run.mixing.names, self._rows, strict=True))

    @property
    def sampling_strategy(self) -> str:
        """The current strategy; "weighted" after weights were set."""
        return self.run.mixing.strategy

    @property
    def index_map(self) -> "IndexMap":
        """`(dataset_idx, example_idx)` of every item, computed when requested."""
        return IndexMap(self.run.mixing)

    def __len__(self) -> int:
        return self.run.mixing.total

    def __getitem__(self, number: int) -> Example:
        source, sample = self.index_map[number]
        return self.read([source], [sample])[0]

    def __getitems__(self, items: BatchRequest | list[int]) -> list[Example]:
        """Several items; a DataLoader reads a batch this way."""
        # Our sampler sends examples that are located already; a sampler of the user sends items.
        if isinstance(items, BatchRequest):
            return self.read(*items)
        pairs = [self.index_map[number] for number in items]
        return self.read([source for source, _ in pairs], [sample for _, sample in pairs])

    def read(self, sources: list[int], samples: list[int]) -> list[Example]:
        """The examples with these numbers, as new dicts with `dataset_name` and `dataset_idx`.

        Raises:
            SourceError: An example is not a dict, or already has one of these keys.
        """
        return self._with_names(self._stored(sources, samples), sources, samples)

    def read_collated(self, sources: list[int], samples: list[int]) -> Example:
        """`default_collate_fn` of these examples; where possible without a dict for each."""
        stored = self._stored(sources, samples)
        batch = collate_same_keys(stored)
        if batch is None or any(key in batch for key in _ADDED):
            return default_collate_fn(self._with_names(stored, sources, samples))
        names = self.run.mixing.names
        return batch | {"dataset_name": [names[s] for s in sources], "dataset_idx": sources}

    def get_dataset_stats(self) -> dict[str, Any]:
        """Names, sizes and shares of the datasets, and how much of each was read on all ranks.

        `sampling_percentage` is the share by the current weights. `asked` is how many examples
        of the run so far a dataset should have by the weights alone, and `delivered` is how many
        it has; docs/mixing.md says how close they are.
        """
        mixing, position = self.run.mixing, self.run.position
        columns = {
            "name": mixing.names,
            "size": mixing.sizes,
            "sampling_percentage": [100 * share for share in mixing.shares(position)],
            "asked": mixing.asked(position),
            "delivered": mixing.delivered(position),
        }
        return {
            "num_datasets": len(mixing.names),
            "total_examples": mixing.total,
            "sampling_strategy": mixing.strategy,
            "datasets": [
                dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)
            ],
        }

    def _stored(self, sources: list[int], samples: list[int]) -> list[Any]:
        """The examples as the datasets return them."""
        # Python's own sequences need no grouping by dataset: `map` reads them without a loop.
        if self._in_memory:
            return list(map(getitem, map(self._rows.__getitem__, sources), samples))
        stored: list[Any] = [None] * len(sources)
        for source in set(sources):
            numbers = [number for number, each in enumerate(sources) if each == source]
            wanted = [samples[number] for number in numbers]
            rows = self._rows[source]
            # Hugging Face datasets read many examples in one call, which is much faster.
            many = getattr(rows, "__getitems__", None)
            items = many(wanted) if many else [rows[sample] for sample in wanted]
            for number, item in zip(numbers, items, strict=True):
                stored[number] = item
        return stored

    def _with_names(
        self, stored: list[Any], sources: list[int], samples: list[int]
    ) -> list[Example]:
        """New dicts: the examples, and the names and numbers of their datasets."""
        try:
            made: list[Example] = list(map(or_, stored, [self._added[s] for s in sources]))
            # If an example had one of the keys already, its new dict is shorter than expected.
            if sum(map(len, made)) == sum(map(len, stored)) + len(_ADDED) * len(stored):
                return made
        except TypeError:  # not a dict, or a mapping without `|`
            pass
        return list(map(self._with_name, stored, sources, samples))

    def _with_name(self, example: object, source: int, sample: int) -> Example:
        """The slow path for one example, with a precise error."""
        name = self.run.mixing.names[source]
        if not isinstance(example, Mapping):
            raise SourceError(
                f'Example {sample:,} of "{name}" is a {type(example).__name__}. Examples must be '
                'dicts, because dataset_name is added to them. Wrap it: {"text": …}.'
            )
        taken = [key for key in _ADDED if key in example]
        if taken:
            raise SourceError(
                f'Example {sample:,} of "{name}" already has {taken[0]!r}, a key that the loader '
                "adds. Rename that key in your examples."
            )
        return {**example, **self._added[source]}


class IndexMap(Sequence[tuple[int, int]]):
    """`(dataset_idx, example_idx)` of every item: a list that is computed when it is read."""

    def __init__(self, mixing: Mixing) -> None:
        self._mixing = mixing

    def __len__(self) -> int:
        return self._mixing.total

    @overload
    def __getitem__(self, number: int) -> tuple[int, int]: ...

    @overload
    def __getitem__(self, number: slice) -> list[tuple[int, int]]: ...

    def __getitem__(self, number: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        if isinstance(number, slice):
            return self._pairs(range(len(self))[number])  # slicing a range handles all signs
        number = index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"There is no item {number:,}; there are {len(self):,}.")
        return self._pairs([number % len(self)])[0]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self), _CHUNK):
            yield from self[start : start + _CHUNK]

    def _pairs(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        sources, _, samples = self._mixing.order.locate(np.array(numbers, dtype=np.int64))
        return list(zip(sources.tolist(), samples.tolist(), strict=True))


def _check_datasets(datasets: Iterable[tuple[str, Examples]]) -> tuple[list[str], list[Examples]]:
    """The names and the datasets, if they can be mixed."""
    try:
        pairs = [(name, rows) for name, rows in datasets]
    except (TypeError, ValueError):
        raise PlanError(
            'datasets must be a list of pairs of a name and examples: [("arc", arc_data), …].'
        ) from None
    if not pairs:
        raise PlanError("datasets is empty. Pass at least one pair of a name and examples.")
    names = [name for name, _ in pairs]
    for name, rows in pairs:
        if not isinstance(name, str) or not name:
            raise PlanError(f"The name of a dataset is {name!r}; it must be a non-empty string.")
        _check_rows(name, rows)
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise PlanError(f"Two datasets have the name {quoted(repeated)}. Use different names.")
    return names, [rows for _, rows in pairs]


def _check_rows(name: str, rows: object) -> None:
    if isinstance(rows, Mapping):
        keys = ", ".join(str(key) for key in list(rows)[:5])
        raise PlanError(
            f'Dataset "{name}" is a {type(rows).__name__} with the keys {keys}, but examples are '
            "numbered from 0. Choose one of its splits, or pass a list of its values."
        )
    if not isinstance(rows, Examples) or isinstance(rows, str | bytes):
        raise PlanError(
            f'Dataset "{name}" is a {type(rows).__name__}. It must be a list of dicts, a Hugging '
            "Face dataset, or another object with len() and []. Make a list of it."
        )
    if not len(rows):
        raise PlanError(f'Dataset "{name}" is empty. Leave it out.')


def _token_counts(lengths: Lengths, names: list[str], rows: list[Examples]) -> tuple[int, ...]:
    """The number of tokens of each dataset; a function is called once per example."""
    listed: list[Any]
    if callable(lengths):
        listed = [[lengths(each[number]) for number in range(len(each))] for each in rows]
    elif isinstance(lengths, Mapping):
        missing = [name for name in names if name not in lengths]
        if missing:
            raise PlanError(f"lengths has no token counts for {quoted(missing)}.")
        listed = [lengths[name] for name in names]
    elif isinstance(lengths, Sequence):
        listed = list(lengths)
    else:
        raise PlanError(
            f"lengths={lengths!r:.80} must be a function of an example, or the token counts of "
            "all examples by dataset."
        )
    if len(listed) != len(names):
        raise PlanError(f"lengths has {len(listed):,} datasets, but there are {len(names):,}.")
    totals = []
    for name, examples, each in zip(names, rows, listed, strict=True):
        counts = _integers(name, each)
        if len(counts) != len(examples) or min(counts) < 0 or not any(counts):
            raise PlanError(
                f'lengths of "{name}" has {len(counts):,} numbers for {len(examples):,} examples, '
                f"from {min(counts, default=0):,} to {max(counts, default=0):,}. Give one token "
                "count per example, each 0 or more and at least one above 0."
            )
        totals.append(sum(counts))
    return tuple(totals)


def _integers(name: str, listed: object) -> list[int]:
    if not isinstance(listed, Iterable):
        raise PlanError(f'lengths of "{name}" is {listed!r:.40}; give a number for each example.')
    counts = list(listed)
    for value in counts:
        if not isinstance(value, SupportsIndex):
            raise PlanError(f'lengths of "{name}": {value!r:.40} is not a whole number of tokens.')
    return list(map(index, counts))
