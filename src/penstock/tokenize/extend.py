"""More special tokens for a tokenizer: the markers of a chat template, say.

New ids follow the vocabulary, so that all ids of before mean what they meant, and a model needs
new rows at the end of its embedding only. A token that is there already keeps its id.

    gpt2                 50,257 ids, 0 to 50,256
    + <|im_start|>       50,257
    + <|im_end|>         50,258
"""

import logging
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.errors import TokenizerError
from penstock.tokenize.definition import Definition, padded_vocab_size, special_token
from penstock.tokenize.objects import is_tiktoken, special_tokens_known
from penstock.tokenize.special_tokens import load_reference

__all__ = [
    "checked_tokens",
    "extended_definition",
    "extended_encoding",
    "log_added",
    "numbered",
]

_log = logging.getLogger("penstock")
_logged: set[tuple[str, ...]] = set()


def checked_tokens(tokens: str | Iterable[str]) -> list[str]:
    """`tokens`, each once.

    Raises:
        TokenizerError: it is no list of texts.
    """
    if isinstance(tokens, str):
        raise TokenizerError(f"add_tokens={tokens!r} is a text; give a list: [{tokens!r}].")
    found = list(dict.fromkeys(tokens))
    for each in found:
        if not isinstance(each, str) or not each.strip():
            raise TokenizerError(f"add_tokens has {each!r}, which is no token; give texts.")
    return found


def numbered(tokens: Sequence[str], first: int) -> dict[str, int]:
    """Ids for new tokens, from `first` on."""
    return {token: first + number for number, token in enumerate(tokens)}


def extended_definition(definition: Definition, tokens: Sequence[str]) -> Definition:
    """`definition` with special tokens added.

    A token that the vocabulary has as an ordinary one keeps its id and becomes special.

    Raises:
        TokenizerError: `tokenizers` would give the tokens other ids.
    """
    listed = definition.config.get("added_tokens") or []
    flagged = {token["content"] for token in listed if token["special"]}
    wanted = [token for token in tokens if token not in flagged]
    if not wanted:
        return definition
    known = {
        token: number for token in wanted if (number := definition.token_id(token)) is not None
    }
    new = numbered([token for token in wanted if token not in known], definition.vocab_size)
    kept = [token for token in listed if token["content"] not in known]
    listed = [*kept, *(special_token(token, number) for token, number in {**known, **new}.items())]
    listed.sort(key=lambda token: token["id"])
    made = replace(
        definition,
        config={**definition.config, "added_tokens": listed},
        added={**definition.added, **known, **new},
    )
    if new and _has_gaps(definition):
        _refuse_other_ids(made, new)
    return made


def _has_gaps(definition: Definition) -> bool:
    """Whether ids are missing between 0 and the largest one, or in the model alone."""
    model = set(definition.pieces.values())
    added = {token["id"] for token in definition.config.get("added_tokens") or []}
    return len(model) != max(model, default=-1) + 1 or len(model | added) != definition.vocab_size


def _refuse_other_ids(definition: Definition, new: dict[str, int]) -> None:
    """Raise where Hugging Face's `tokenizers` numbers new tokens otherwise.

    It counts pieces and does not look for the largest id, so that a vocabulary with gaps would
    give an id that is taken or that means another token elsewhere.
    """
    hub = load_reference(definition.text, definition.name)
    for token, number in new.items():
        if hub.token_to_id(token) != number:
            raise TokenizerError(
                f"The vocabulary of {definition.name} has gaps: {token!r} would be {number:,}, "
                f"after its largest id, and tokenizers makes it {hub.token_to_id(token):,}. Add "
                "the tokens to its tokenizer.json with the library that trained it."
            )


def extended_encoding(tokenizer: Any, tokens: Sequence[str]) -> tuple[Any, dict[str, int]]:
    """A tiktoken encoding with special tokens added, and the ids of those that are new.

    Raises:
        TokenizerError: it is another kind of object.
    """
    special = special_tokens_known(tokenizer)
    wanted = [token for token in tokens if token not in special]
    if not wanted:
        return tokenizer, {}
    if not is_tiktoken(tokenizer):
        raise TokenizerError(
            f"{type(tokenizer).__name__} is an object that penstock cannot extend by "
            f"{', '.join(wanted[:5])}. Add the tokens to it yourself, or use a tokenizer.json."
        )
    new = numbered(wanted, tokenizer.n_vocab)
    made = type(tokenizer)(
        tokenizer.name,
        pat_str=tokenizer._pat_str,
        mergeable_ranks=tokenizer._mergeable_ranks,
        special_tokens={**special, **new},
    )
    return made, new


def log_added(name: str, added: Mapping[str, int], vocab_size: int) -> None:
    """Log which tokens a tokenizer was extended by, once: the model must have as many ids."""
    key = (name, *added)
    if key in _logged or multiprocessing.parent_process() is not None:
        return
    _logged.add(key)
    pairs = [f"{token} ({number:,})" for token, number in added.items()]
    more = [f"and {len(pairs) - 10:,} more"] if len(pairs) > 10 else []
    _log.warning(
        "%s has these tokens besides: %s. Its vocab_size is now %s, and the model's embedding "
        "needs as many rows; the next multiple of 64 is %s.",
        name,
        ", ".join(pairs[:10] + more),
        f"{vocab_size:,}",
        f"{padded_vocab_size(vocab_size):,}",
    )
