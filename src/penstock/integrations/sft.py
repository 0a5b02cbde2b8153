"""Yields padded batches of conversations for supervised fine-tuning, without end.

It replaces the generator that fine-tuning scripts write by hand: rank r of w reads rows r, r + w,
r + 2w, … of the dataset, again and again, and yields pairs of tensors.

    tokens    <bos> user Hi <end> assistant Hello . <end>
    inputs    <bos> user Hi <end> assistant Hello .
    targets    -1    -1  -1  -1     Hello     .  <end>       only the assistant's tokens

Rows are padded to the longest row of their batch. Padding and tokens that are not trained on have
the ignore index as their target. Several batches of conversations are rendered in one call, which
is several times as fast as one call of the tokenizer for each message.

Positions continue past the end of the dataset. If its length does not divide by the number of
ranks, a rank begins its next epoch at another row. Each row is still read once an epoch, and no
rank is ahead of another.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from penstock.chat.chat import Chat
from penstock.errors import ChatError, PlanError, ResumeError
from penstock.loader.arguments import topology
from penstock.loader.rank_positions import RankPositions
from penstock.loader.state import sealed, unsealed

__all__ = ["SFTBatches", "SFTCollate", "sft_data_generator"]

Conversation: TypeAlias = Any
"""A row of the user's dataset."""
Render = Callable[[Conversation], tuple[ArrayLike, ArrayLike]]
Pair = tuple[torch.Tensor, torch.Tensor]
Rendered = tuple[NDArray[np.integer], NDArray[np.generic]]

_VERSION = 1
_FIELDS = {"position": int, "num_rows": int}
# Conversations rendered in one call. More than this is not faster.
_AT_ONCE = 512


class Conversations(Protocol):
    """A dataset: anything with `len` and `[]`."""

    def __len__(self) -> int:
        """The number of rows."""

    def __getitem__(self, number: int, /) -> Conversation:
        """One conversation."""


@dataclass
class SFTCollate:
    """A `collate_fn` that turns a list of conversations into `(inputs, targets)`.

    Can be pickled to worker processes, where each renders with its own `Chat`.
    """

    chat: Chat | Render
    """A `Chat`, or a function from a conversation to its tokens and mask."""
    _: KW_ONLY
    pad_token_id: int | None = None
    """The id in padded places; the tokenizer's end token if not given."""
    ignore_index: int = -1
    """The target of tokens that are not trained on: -1, or PyTorch's -100."""
    max_length: int | None = None
    """The most tokens of a conversation; longer ones are truncated."""
    num_truncated: int = field(default=0, init=False, compare=False)
    """The number of conversations that were truncated so far."""
    num_truncated_tokens: int = field(default=0, init=False, compare=False)
    """The number of tokens that truncation has removed so far."""

    def __post_init__(self) -> None:
        if not isinstance(self.chat, Chat) and not callable(self.chat):
            raise PlanError(
                f"chat={self.chat!r:.80} is neither a penstock.Chat nor a function from a "
                "conversation to its tokens and mask. Make one with penstock.Chat."
            )
        # Any id would do: padding has no target, and causal attention does not look ahead.
        if self.pad_token_id is None and isinstance(self.chat, Chat):
            self.pad_token_id = self.chat.tokenizer.eos_id
        if self.pad_token_id is None or self.pad_token_id < 0:
            raise PlanError(
                f"pad_token_id={self.pad_token_id} cannot pad rows, and the tokenizer has no end "
                "token to use instead. Give any id of the vocabulary; padding is never trained on."
            )
        if self.max_length is not None and self.max_length < 2:
            raise PlanError(f"max_length={self.max_length} must be at least 2, for one target.")
        if self.ignore_index >= 0:  # the loss would leave out real tokens with this id
            raise PlanError(f"ignore_index={self.ignore_index} may be a token id; use -1 or -100.")

    def __call__(self, conversations: Sequence[Conversation]) -> Pair:
        """The `(inputs, targets)` of some conversations."""
        return self.pad(self.render(conversations))

    def render(
        self, conversations: Sequence[Conversation], numbers: Sequence[int] | None = None
    ) -> list[Rendered]:
        """The tokens and mask of each conversation, truncated to `max_length`.

        Args:
            conversations: The conversations to render.
            numbers: Their row numbers for error messages; 0, 1, 2, … if not given.

        Raises:
            ChatError: a conversation cannot be rendered, or its mask does not match its tokens.
        """
        rows: Sequence[tuple[ArrayLike, ArrayLike]]
        if isinstance(self.chat, Chat):
            rows = self.chat.render_many(conversations)
        else:
            rows = list(map(self.chat, conversations))
        numbers = range(len(rows)) if numbers is None else numbers
        checked = [_checked(row, number) for row, number in zip(rows, numbers, strict=True)]
        stop = self.max_length
        if stop is None or not any(len(tokens) > stop for tokens, _ in checked):
            return checked
        return self._truncated(checked, stop)

    def _truncated(self, rows: list[Rendered], stop: int) -> list[Rendered]:
        """Return rows of at most `stop` tokens; count what is lost, and warn the first time."""
        kept = [(tokens[:stop], mask[:stop]) for tokens, mask in rows]
        cut = [len(tokens) - stop for tokens, _ in rows if len(tokens) > stop]
        if not self.num_truncated:
            untrained = sum(
                bool(whole[1][1:].any()) and not mask[1:].any()
                for whole, (_, mask) in zip(rows, kept, strict=True)
            )
            warnings.warn(
                f"{len(cut):,} of {len(rows):,} conversations are longer than max_length={stop:,} "
                f"tokens and were truncated, which loses {sum(cut):,} tokens; {untrained:,} of "
                "them have no target left. A larger max_length keeps them. Later ones are counted "
                "without a warning.",
                stacklevel=4,
            )
        self.num_truncated += len(cut)
        self.num_truncated_tokens += sum(cut)
        return kept

    def pad(self, rows: Sequence[Rendered]) -> Pair:
        """The `(inputs, targets)` of rendered conversations; targets are shifted by one."""
        width = max(len(tokens) for tokens, _ in rows) - 1  # the last token is only a target
        inputs = np.full((len(rows), width), self.pad_token_id, np.int64)
        targets = np.full((len(rows), width), self.ignore_index, np.int64)
        for number, (tokens, mask) in enumerate(rows):
            size = len(tokens) - 1
            inputs[number, :size] = tokens[:-1]
            # The target at place i is token i + 1, if the mask says that it is trained on.
            trained = np.flatnonzero(mask[1:])
            targets[number, trained] = tokens[1:][trained]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def _checked(row: tuple[ArrayLike, ArrayLike], number: int) -> Rendered:
    """The tokens and mask of a row as arrays, after checking that they match."""
    try:
        tokens, mask = map(np.asarray, row)
    except (TypeError, ValueError):
        problem = f"as {row!r:.60}, which is not a pair of tokens and mask"
    else:
        problem = ""
        if not tokens.size:
            problem = "to no tokens"
        elif tokens.shape != mask.shape or tokens.ndim != 1:
            problem = (
                f"to {tokens.size:,} tokens and a mask of {mask.size:,}, of the shapes "
                f"{tokens.shape} and {mask.shape}; each token needs one mask value: 1 if it is "
                "trained on, otherwise 0"
            )
        elif tokens.dtype.kind not in "iu":
            problem = f"to {tokens.dtype}, not to integer ids"
    if problem:
        raise ChatError("bad_rendering", f"Row {number:,} was rendered {problem}.")
    return tokens, mask


class SFTBatches:
    """Batches `(inputs, targets)` of conversations, without end.

    Attributes:
        position: The number of rows that all ranks together have yielded.
        num_untrained: Rows yielded by this rank in which no token is trained on.
        num_truncated: Rows rendered by this rank, some of them ahead, that were truncated.

    >>> row = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    >>> chat = Chat("chatml", "gpt2", add_tokens="auto")
    >>> inputs, targets = next(sft_data_generator([row], 1, chat))
    >>> chat.tokenizer.decode(targets[targets != -1])
    'Hello.<|im_end|>'
    """

    def __init__(  # noqa: PLR0913  (a drop-in: the arguments of the code it replaces)
        self,
        dataset: Conversations,
        batch_size: int,
        chat: Chat | Render,
        *,
        pad_token_id: int | None = None,
        ignore_index: int = -1,
        max_length: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        """Begin at the first row.

        Args:
            dataset: Anything with `len` and `[]` whose rows are conversations in a known format.
            batch_size: Rows in a batch, on each rank.
            chat: A `Chat`, or a function from a row to its tokens and mask.
            pad_token_id: The id in padded places; the tokenizer's end token if not given.
            ignore_index: The target of tokens that are not trained on: -1, or PyTorch's -100.
            max_length: The most tokens of a conversation; longer ones are truncated.
            rank: The number of this process; if not given, that of torch.distributed, or 0.
            world_size: The number of processes; if not given, that of torch.distributed, or 1.
                Give it together with `rank`.
            device: The device of the tensors.
        """
        self._collate = SFTCollate(
            chat, pad_token_id=pad_token_id, ignore_index=ignore_index, max_length=max_length
        )
        self._rank, self._world_size = topology(rank, world_size)
        if isinstance(dataset, str | os.PathLike):
            raise PlanError(
                f"dataset={str(dataset)!r:.80} must be rows, not a path: a list of conversations, "
                "or a Hugging Face dataset."
            )
        if len(dataset) < 1:
            raise PlanError("The dataset is empty; there is nothing to train on.")
        if batch_size < 1:
            raise PlanError(f"batch_size={batch_size} must be at least 1.")
        self._dataset, self._batch_size, self._device = dataset, batch_size, device
        self._ready: list[Rendered] = []
        self.position = 0
        self._ranks = RankPositions(self._world_size)
        self.num_untrained = 0

    def __repr__(self) -> str:
        rank = f"rank {self._rank} of {self._world_size}"
        batches = f"batches of {self._batch_size:,} rows, {rank}"
        return f"SFTBatches({len(self._dataset):,} rows; {batches}; at position {self.position:,})"

    @property
    def num_truncated(self) -> int:
        """The number of rows that this rank has truncated; up to 512 rows are rendered ahead."""
        return self._collate.num_truncated

    def __iter__(self) -> Iterator[Pair]:
        return self

    def __next__(self) -> Pair:
        self._ranks.check(self.position, self._settings)
        # One call renders about 512 conversations, from which the next batches are taken.
        if not self._ready:
            self._ready = self._render_ahead()
        rows = self._ready[: self._batch_size]
        del self._ready[: self._batch_size]
        # The position counts rows of all ranks, so that any number of ranks can continue from it.
        self.position += self._batch_size * self._world_size
        # The first token is never a target, so its mask value does not count.
        self.num_untrained += sum(not mask[1:].any() for _, mask in rows)
        inputs, targets = self._collate.pad(rows)
        return inputs.to(device=self._device), targets.to(device=self._device)

    def state_dict(self) -> dict[str, object]:
        """The position as JSON: the same on every rank, and valid for any number of ranks."""
        return sealed({"position": self.position, "num_rows": len(self._dataset)}, _VERSION)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a state.

        Raises:
            ResumeError: the state was changed after it was written, or belongs to a dataset of
                another length.
        """
        saved = unsealed(state, _VERSION, _FIELDS, of="SFT batches")
        if saved["num_rows"] != len(self._dataset):
            raise ResumeError(
                f"The state is of a dataset of {saved['num_rows']:,} rows, but this one has "
                f"{len(self._dataset):,}: rows would be repeated or left out. Use the dataset that "
                "the state was saved with."
            )
        self.position = saved["position"]
        self._ready = []  # rendered for the old position
        self._ranks.moved()

    def _settings(self) -> dict[str, object]:
        return {"num_rows": len(self._dataset), "batch_size": self._batch_size}

    def _render_ahead(self) -> list[Rendered]:
        """The next rows of this rank, rendered in one call."""
        batches = max(1, _AT_ONCE // self._batch_size)
        # Batch n of rank r has the rows from position + r on, world_size apart.
        first = self.position + self._rank
        wanted = [
            (first + number * self._world_size) % len(self._dataset)
            for number in range(batches * self._batch_size)
        ]
        records = [self._dataset[number] for number in wanted]
        try:
            return self._collate.render(records, wanted)
        except ChatError:
            # The error is about one of many conversations: render them one by one to find it.
            for number, record in zip(wanted, records, strict=True):
                try:
                    self._collate.render([record], [number])
                except ChatError as error:
                    error.args = (f"Row {number:,} of the dataset, counting from 0: {error}",)
                    raise error from None
            raise


def sft_data_generator(
    dataset: Conversations, batch_size: int, chat: Chat | Render, **options: Any
) -> SFTBatches:
    """Return batches `(inputs, targets)` of conversations, without end.

    Hand-written generators often have this name. The arguments are those of `SFTBatches`:
    `pad_token_id`, `ignore_index`, `max_length`, `rank`, `world_size`, `device`.
    """
    return SFTBatches(dataset, batch_size, chat, **options)
