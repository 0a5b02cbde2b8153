"""Several datasets as one map-style dataset.

    datasets   arc  ████████     gsm8k  ████     mmlu  █
    index_map  (0, 5) (1, 2) (0, 7) (0, 0) (2, 0) (1, 3) …     computed, not stored
    item i     the example at index_map[i], with the name and number of its dataset

The datasets are not copied, and an example is read when it is requested. Every returned example
is a new dict, so the examples of the user never change.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import getitem, itemgetter, or_
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import Dataset

from penstock.errors import PlanError, SourceError
from penstock.integrations.multiplex.mixing import Json, Lengths, Weights, new_mixing
from penstock.integrations.multiplex.run import BatchRequest, IndexMap, MultiplexRun

Example = dict[str, Any]

_ADDED = ("dataset_name", "dataset_idx")
_STATISTICS = ("name", "size", "sampling_percentage", "asked", "delivered")


@runtime_checkable
class Examples(Protocol):
    """A dataset: a list of dicts, a Hugging Face dataset, or a similar class.

    Its length must not change.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class MultiplexDataset(Dataset[Example]):
    """Named datasets in one order: item i is an example with `dataset_name` and `dataset_idx`.

    The length is the number of all examples, for every strategy. For a new order in each epoch,
    or weights that change, use a loader: `create_multiplex_dataloader`.

    Args:
        datasets: Pairs of a name and a sized sequence of dicts: a list, a Hugging Face dataset,
            or any object with `len()` and `[]`. If it has a method `__getitems__`, the method is
            called once per batch.
        sampling_strategy: "proportional", "uniform" or "weighted".
        sampling_weights: Shares in the order of `datasets`, or by name.
        shuffle_seed: A different seed gives a different order.
        schedule: `{10_000: [0.2, 0.8]}`: other weights from example 10,000 of the run on.
        lengths: If given, weights are shares of tokens. A function that returns the number of
            tokens of an example, or the token counts of all examples by dataset.
            `penstock.integrations.multiplex.mixing` describes the guarantee.

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
        self.datasets = _checked(datasets)
        """The pairs that were passed; the datasets are the same objects."""
        self._rows = [rows for _, rows in self.datasets]
        mixing = new_mixing(
            self.datasets, sampling_strategy, sampling_weights, shuffle_seed, schedule, lengths
        )
        mixing.order  # noqa: B018  (raises errors now, not at the first batch)
        self.run = MultiplexRun(mixing)
        """The current order and position. Only the loader of this dataset changes it."""
        self._added = [dict(zip(_ADDED, (n, i), strict=True)) for i, n in enumerate(mixing.names)]
        self._in_memory = all(type(rows) in (list, tuple) for rows in self._rows)

    @property
    def sampling_strategy(self) -> str:
        """The current strategy; "weighted" after weights were set."""
        return self.run.mixing.strategy

    @property
    def index_map(self) -> IndexMap:
        """`(dataset_idx, example_idx)` of every item, computed when requested."""
        return IndexMap(self.run.mixing)

    def __repr__(self) -> str:
        shown = [f"{name}: {len(rows):,}" for name, rows in self.datasets[:5]]
        more = f" and {len(self._rows) - 5:,} more" if len(self._rows) > 5 else ""
        return f"MultiplexDataset({', '.join(shown)}{more} examples, {self.sampling_strategy})"

    def __len__(self) -> int:
        return self.run.mixing.total

    def __getitem__(self, number: int) -> Example:
        source, sample = self.index_map[number]
        return self.read([source], [sample])[0]

    def __getitems__(self, items: BatchRequest | list[int]) -> list[Example]:
        """Return several items; a DataLoader reads a batch this way."""
        # Our sampler sends a BatchRequest, which already names the examples. A user's sampler
        # sends item numbers.
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
        """Return `default_collate_fn` of these examples, if possible without a dict for each."""
        stored = self._stored(sources, samples)
        batch = _collate_same_keys(stored)
        if batch is None or any(key in batch for key in _ADDED):
            return default_collate_fn(self._with_names(stored, sources, samples))
        names = self.run.mixing.names
        return batch | {"dataset_name": [names[s] for s in sources], "dataset_idx": sources}

    def get_dataset_stats(self) -> Json:
        """Names, sizes and shares of the datasets, and how much of each was read on all ranks.

        `sampling_percentage` is the share by the current weights: of examples or, with `lengths`,
        of their lengths. `asked` is the number of
        examples that the weights give to a dataset so far, usually a fraction. `delivered` is the
        number of its examples that were read. docs/mixing.md says how close the two are.
        """
        mixing = self.run.mixing
        statistics = mixing.statistics(self.run.position)
        return {
            "num_datasets": len(mixing.names),
            "total_examples": mixing.total,
            "sampling_strategy": mixing.strategy,
            "datasets": [dict(zip(_STATISTICS, each, strict=True)) for each in statistics],
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
        if taken := [key for key in _ADDED if key in example]:
            raise SourceError(
                f'Example {sample:,} of "{name}" already has {taken[0]!r}, a key that the loader '
                "adds. Rename that key in your examples."
            )
        return {**example, **self._added[source]}


def _checked(datasets: Iterable[tuple[str, Examples]]) -> list[tuple[str, Examples]]:
    """Return the pairs of names and datasets; raise if they cannot be mixed."""
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
        if names.count(name) > 1:
            raise PlanError(f'Two datasets have the name "{name}". Use different names.')
        if isinstance(rows, Mapping):
            keys = ", ".join(str(key) for key in list(rows)[:5])
            raise PlanError(
                f'Dataset "{name}" is a {type(rows).__name__} with the keys {keys}, but examples '
                "are numbered from 0. Choose one of its splits, or pass a list of its values."
            )
        if not isinstance(rows, Examples) or isinstance(rows, str | bytes):
            raise PlanError(
                f'Dataset "{name}" is a {type(rows).__name__}. It must be a list of dicts, a '
                "Hugging Face dataset, or another object with len() and []. Make a list of it."
            )
        if not len(rows):
            raise PlanError(f'Dataset "{name}" is empty. Leave it out.')
    return pairs


def default_collate_fn(batch: Sequence[Mapping[str, Any]]) -> Example:
    """A dict with the keys of all examples: stacked tensors, and lists of everything else.

    Tensors of equal shape are stacked. Lists are in the order of the batch. Keys are in the order
    in which they first appear.

    >>> default_collate_fn([{"text": "a", "label": 1}, {"text": "b"}])
    {'text': ['a', 'b'], 'label': [1, None]}
    """
    keys = dict.fromkeys(key for example in batch for key in example)
    return {key: _stacked([example.get(key) for example in batch]) for key in keys}


def _collate_same_keys(batch: Sequence[Any]) -> Example | None:
    """`default_collate_fn` of plain dicts that have the same keys; None for other examples.

    It is faster, because it reads all values of an example in one call.
    """
    first = batch[0]
    # Plain dicts only: reading a missing key of a defaultdict would add the key to it. With one
    # key, `itemgetter` returns the value itself instead of a tuple.
    if set(map(type, batch)) != {dict} or len(first) < 2:
        return None
    # If every example has the keys of the first (no KeyError below), and all examples together
    # have no more keys than that, then all have the same keys.
    if sum(map(len, batch)) != len(first) * len(batch):
        return None
    try:
        values = zip(*map(itemgetter(*first), batch), strict=True)
        return {key: _stacked(list(each)) for key, each in zip(first, values, strict=True)}
    except KeyError:
        return None


def _stacked(values: list[Any]) -> Any:
    """The values of one key: one tensor if all are tensors of the same shape."""
    first = values[0]
    if isinstance(first, torch.Tensor) and all(
        isinstance(value, torch.Tensor) and value.shape == first.shape for value in values
    ):
        return torch.stack(values)
    return values


def get_dataset_stats(dataloader: object) -> Json:
    """`MultiplexDataset.get_dataset_stats` of a multiplex DataLoader or dataset.

    >>> get_dataset_stats(MultiplexDataset([("a", [{"n": 1}])]))["datasets"][0]
    {'name': 'a', 'size': 1, 'sampling_percentage': 100.0, 'asked': 0.0, 'delivered': 0}

    Raises:
        TypeError: The argument is neither a multiplex DataLoader nor a MultiplexDataset.
    """
    # Frameworks wrap DataLoaders in classes of their own, which keep `dataset`.
    dataset = getattr(dataloader, "dataset", dataloader)
    if not isinstance(dataset, MultiplexDataset):
        raise TypeError(
            f"A {type(dataloader).__name__} has no statistics of datasets. Pass the DataLoader "
            "that create_multiplex_dataloader returned, or a MultiplexDataset."
        )
    return dataset.get_dataset_stats()


def print_dataloader_stats(dataloader: object) -> None:
    """Print the names, sizes and shares of the datasets as a table.

    Raises:
        TypeError: The argument is neither a multiplex DataLoader nor a MultiplexDataset.
    """
    stats = get_dataset_stats(dataloader)
    double, single = "=" * 70, "-" * 70
    lines = [
        double,
        "Multiplex DataLoader Statistics",
        double,
        f"Number of datasets: {stats['num_datasets']}",
        f"Total examples: {stats['total_examples']:,}",
        f"Sampling strategy: {stats['sampling_strategy']}",
        "",
        "Dataset Breakdown:",
        single,
        f"{'Dataset':<30} {'Examples':<15} {'Sampling %':<15}",
        single,
        *(
            f"{each['name']:<30} {each['size']:<15,} {each['sampling_percentage']:.2f}%"
            for each in stats["datasets"]
        ),
        double,
    ]
    dataset = getattr(dataloader, "dataset", dataloader)
    if isinstance(dataset, MultiplexDataset) and dataset.run.mixing.num_tokens is not None:
        lines[-1:-1] = ["Sampling % is the share of the lengths, not of the examples."]
    print("\n".join(lines))  # noqa: T201  (the purpose of this function)
