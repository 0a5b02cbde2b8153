"""Batches with Hugging Face's field names, and its tokenizers.

    tokens           a b c .        two rows, padded to three tokens
                     d e . .
    attention_mask   1 1 1 0
    labels           a b c -        "same": a label for every token; - is -100
    labels           b c - -        "shifted": the next token, so the last token has no label

Packed rows have `position_ids` instead of `attention_mask`. Given both, models of `transformers`
ignore where documents begin, and attend across documents. With their cache they do so too, so
packed batches also get `use_cache=False`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.errors import MissingExtraError, PlanError, TokenizerError
from penstock.loader.batch_format import Format
from penstock.loader.packed import outermost_models
from penstock.rows.documents import Documents
from penstock.rows.packs import Packs
from penstock.rows.protocol import Fields, Integers, WrappedRows
from penstock.rows.tokens import Stream
from penstock.rows.windows import Windows
from penstock.tokenize.definition import byte_alphabet, find_definition

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Labels = Literal["shifted", "same"]
Convention = Literal["shifted", "same", "either", "neither"]
Tensors = dict[str, torch.Tensor]

_END = "<|endoftext|>"


def check_labels(labels: str) -> None:
    """Raise if `labels` is not "shifted" or "same"."""
    if labels not in ("shifted", "same"):
        raise PlanError(f'labels={labels!r} is not "shifted" or "same".')


def label_convention(input_ids: torch.Tensor, labels: torch.Tensor) -> Convention:
    """The convention of the labels of a batch; labels of -100 match any.

    >>> rows = torch.tensor([[1, 2, 3, 4]])
    >>> label_convention(rows[:, :-1], rows[:, 1:]), label_convention(rows, rows)
    ('shifted', 'same')
    """
    # The last label of a shifted row has no input to compare with; a row of one token fits both.
    ahead, behind = labels[:, :-1], input_ids[:, 1:]
    shifted = bool(((ahead == behind) | (ahead == -100)).all())
    same = bool(((labels == input_ids) | (labels == -100)).all())
    if shifted and same:
        return "either"
    return "shifted" if shifted else "same" if same else "neither"


def refuse_second_shift(module: Any) -> None:
    """Make causal language models of transformers in a module refuse labels that are shifted.

    Their loss shifts labels itself, so the model would learn the token after the next one. Only
    the first call with labels is checked. Calls without labels, for the logits, stay allowed.
    """
    for model in outermost_models(module):
        # Other losses do not shift. None: models such as GPT2LMHeadModel, whose loss shifts.
        if model.loss_type in (None, "ForCausalLM"):
            _check_first_labels(model)
            # Adapters of peft call `forward` of the model inside them, which runs no hook of it.
            for each in module.modules():
                is_adapter = type(each).__module__.startswith("peft.")
                if is_adapter and any(inner is model for inner in each.modules()):
                    _check_first_labels(each)


def _check_first_labels(model: torch.nn.Module) -> None:
    def check(_: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        input_ids = given[0] if given else named.get("input_ids")
        labels = named.get("labels")
        if input_ids is None or labels is None or torch.compiler.is_compiling():
            return
        convention = label_convention(input_ids, labels)
        if convention == "shifted":
            raise PlanError(
                f"{type(model).__name__} shifts labels itself, and the labels of this batch are "
                "shifted already: it would learn the token after the next one. Set "
                'labels="same" where the data is made. Or keep shifted labels, call the model '
                "without them, and compute cross_entropy(logits, labels)."
            )
        if convention != "either":  # a batch without labels says nothing
            handle.remove()

    handle = model.register_forward_pre_hook(check, with_kwargs=True)


def input_label_pair(batch: Tensors) -> Tensors:
    """A dict of `input_ids` and `labels`, and `position_ids` if the batch has them.

    The tensors are contiguous, which `.view(-1)` needs.
    """
    # The loader calls them inputs and targets, or input_ids and labels; they come first.
    inputs, labels, *_ = batch.values()
    pair = {"input_ids": inputs.contiguous(), "labels": labels.contiguous()}
    if "position_ids" in batch:
        pair["position_ids"] = batch["position_ids"].long()
    return pair


@dataclass(frozen=True)
class PaddedFormat:
    """Converts `format="narrow"` batches of a loader to batches with Hugging Face's field names."""

    pad_id: int
    shifted: bool
    every_token: bool
    """Whether every token has a label; otherwise only targets have one."""

    def __call__(self, arrays: Tensors) -> Tensors:
        """Return `input_ids`, `labels`, and `attention_mask` or `position_ids`."""
        tokens = arrays["tokens"].long()
        counted = arrays.get("target_mask")
        if counted is None:
            counted = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
        if "attention_mask" in arrays:
            real = arrays["attention_mask"] != 0
        else:  # in a window, the first token and every target are text
            real = torch.cat((torch.ones_like(counted[:, :1]), counted[:, :-1]), dim=1)
        # Rows are padded with 0, which is the id of a token, so padding is replaced by `pad_id`.
        # The last column is a target only, never an input.
        input_ids = tokens[:, :-1].masked_fill(~real, self.pad_id)
        if self.shifted:
            labels = tokens[:, 1:].masked_fill(~counted, -100)
        else:
            trained = real
            if not self.every_token:
                # Column i of `counted` says whether token i + 1 is a target. The first token of
                # a row is never a target.
                first = torch.zeros_like(real[:, :1])
                trained = real & torch.cat((first, counted[:, :-1]), dim=1)
            labels = input_ids.masked_fill(~trained, -100)
        if "position_ids" in arrays:
            positions = arrays["position_ids"].long()
            return {"input_ids": input_ids, "labels": labels, "position_ids": positions}
        return {"input_ids": input_ids, "attention_mask": real.long(), "labels": labels}


class MaskedPacks(WrappedRows):
    """Packs whose rows also have an `attention_mask`: which columns hold a token.

    The mask decides what padding contains and which labels count. Batches do not contain it.
    """

    def __init__(self, packs: Packs) -> None:
        super().__init__(packs)
        self.packs = packs
        self.stream: Stream = packs.stream

    def __repr__(self) -> str:
        return repr(self.packs)

    @property
    def padding_share(self) -> float:
        """The share of all columns that hold no token."""
        return self.packs.padding_share

    def over(self, stream: Stream) -> "MaskedPacks":
        """Return the same rows over a later snapshot of a store that is being written."""
        return MaskedPacks(self.packs.over(stream))

    def read(self, samples: Integers) -> Fields:
        """The rows `samples` as `Packs.read` returns them, and the mask (rows, length)."""
        fields = self.packs.read(samples)
        # A row has one token more than targets.
        real = np.arange(self.length) <= fields["num_targets"][:, None]
        return {**fields, "attention_mask": real.view(np.uint8)}


@dataclass(frozen=True)
class RowFormat:
    """Rows, and how a loader's batches of them become the user's batches."""

    rows: Windows | Documents | MaskedPacks
    to_batch: Callable[[Tensors], Tensors]
    format: Format
    """The format of the loader's batches that `to_batch` takes."""
    packed: bool
    """Whether rows contain several documents, for a model that finds them in `position_ids`."""


def row_format(
    rows: Windows | Documents | Packs | MaskedPacks, pad_id: int | None, labels: Labels
) -> RowFormat:
    """Return how batches of `rows` are made for models of `transformers`."""
    check_labels(labels)
    if not isinstance(rows, Windows | Documents | Packs | MaskedPacks):
        raise PlanError(
            f"{rows!r:.80} cannot be read here: give Windows, Packs or Documents. A plan and "
            'transformed rows are read by penstock.Loader(…, format="hf") in a loop of your own.'
        )
    shifted = labels == "shifted"
    packed = not shifted and rows.gives_positions
    if isinstance(rows, Windows):
        rows = rows if shifted else rows.overlapping()
        return RowFormat(rows, input_label_pair, "dict" if shifted else "hf", packed)
    if isinstance(rows, Packs):
        rows = MaskedPacks(rows)
    if pad_id is None:  # packs may have any id in padding: no real token attends to it
        pad_id = rows.pad_id if isinstance(rows, Documents) else 0
    # In a pack the first token of a document has no label: it would be predicted from the
    # document before it. In a chat store, only the assistant's tokens have labels.
    every_token = isinstance(rows, Documents) and not rows.stream.has_loss
    to_batch = PaddedFormat(pad_id, shifted=shifted, every_token=every_token)
    return RowFormat(rows, to_batch, "narrow", packed)


def hf_tokenizer(name: str) -> "PreTrainedTokenizerFast":
    """The tokenizer that `name` means, as a fast tokenizer of `transformers`.

    As usual in `transformers`, a special token that is written in a text becomes that token.
    `pad_token` is the end token. "gpt2" and "bytes" need no network.

    Args:
        name: "gpt2", "bytes", a tokenizer.json, a directory with one, or a name on the Hub.
    """
    # Imported here: it takes a second, and only users who decode text need it.
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise MissingExtraError(
            "A tokenizer with Hugging Face's API needs transformers, which is not installed.\n"
            'Install it with: pip install "penstock[lightning]"'
        ) from None
    if name.startswith("tiktoken:"):
        raise TokenizerError(
            f"{name} cannot become a tokenizer of transformers, because tiktoken has no "
            "tokenizer.json. Use a tokenizer.json, or a name on the Hub, with the same vocabulary."
        )
    definition = None if name == "bytes" else find_definition(name)
    end = _END if definition is None else definition.eos_token
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(definition.text) if definition else _byte_backend(),
        name_or_path=name,
        bos_token=definition.bos_token if definition else end,
        eos_token=end,
        pad_token=end,
        clean_up_tokenization_spaces=False,
        # transformers 4 would return `token_type_ids` too, and GPT-2 adds an embedding for them.
        model_input_names=["input_ids", "attention_mask"],
    )


def _byte_backend() -> Tokenizer:
    """The tokenizer "bytes": the id of a byte is its value, and 256 ends a document."""
    backend = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(_END, special=True)])
    return backend
