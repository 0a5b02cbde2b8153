r"""The markers of a template that must be tokens, and the tokenizer that has them.

    <|im_start|>user\nZqvi alpha?<|im_end|>\n<|im_start|>assistant\nZqwo beta.<|im_end|>\n
    └ around ──┘                 └ around ─────────────┘                      └── end ─┘

A marker that is no token of its own is read as several ordinary ones. Whoever writes a message
can write them too, and so end a turn that is not theirs. And a short conversation grows by a
quarter: the second example of GSM8K from 90 tokens to 114. So:

- What ends a turn of the assistant must be a token.
- All markers of a built-in template must be tokens.
- Other markers that look like tokens (`<|user|>`, in a template that ends turns with `</s>`) may
  be text, as they are to the models that were published with such templates; a line in the log
  says so.

A marker that is a token, but is not called special, is treated as special by the chat: only the
template can write it.
"""

import logging
import re

from penstock.chat.special_tokens import Markers, special_tokens_of
from penstock.chat.template import Template, is_builtin
from penstock.chat.turns import ANSWER
from penstock.errors import TemplateError
from penstock.tokenize.tokenizer import Tokenizer, load_tokenizer, with_special

__all__ = ["tokenizer_with_markers"]

_log = logging.getLogger("penstock")

# What looks like a token: <|im_end|>, also with the wide bars that DeepSeek writes.
_CONTROL = re.compile("<\\|[\\w/:.-]{1,40}\\|>|<\uff5c[\\w/:.\u2581 -]{1,40}\uff5c>")
# Thoughts may be part of what a message says, and then are not the template's alone.
_THOUGHT = re.compile("think|thought|reason", re.IGNORECASE)


def tokenizer_with_markers(
    tokenizer: Tokenizer, template: Template, sample: str, markers: Markers, *, add: bool
) -> Tokenizer:
    """A tokenizer to which the markers of the template are special tokens.

    Args:
        tokenizer: The tokenizer that was given.
        template: The template.
        sample: What it makes of a question and an answer; "" where that is not known.
        markers: Finds markers in it.
        add: Whether to add the tokens that are missing.

    Raises:
        TemplateError: tokens are missing, and are not to be added.
    """
    known = _tokens(tokenizer)
    around = [sample[slice(*span)] for span in markers.find(sample)]
    tail = sample.partition(ANSWER)[2]
    group = markers.first_group(tail)
    end = [] if group is None else [tail[slice(*span)] for span in _within(markers, tail, group)]
    ends_with_token = not end or not known.isdisjoint(end)
    lost = [
        each
        for each in dict.fromkeys([*around, *_CONTROL.findall(template.source)])
        if each not in known and (_CONTROL.fullmatch(each) or (each in end and not ends_with_token))
    ]
    if add:
        tokenizer = load_tokenizer(tokenizer, add_tokens=lost)
    elif lost and (is_builtin(template) or not ends_with_token):
        raise _refusal(tokenizer, template, lost)
    elif written := [each for each in lost if each in around]:
        _log.warning(
            "The template %s writes %s, which %s has no token for: the text of a message can hold "
            'the same tokens. If the model does not know them so, add_tokens="auto" '
            "(--add-tokens auto) makes each a token.",
            template.name,
            ", ".join(written),
            tokenizer.name,
        )
    return _with_all_special(tokenizer, [each for each in around if not _THOUGHT.search(each)])


def _refusal(tokenizer: Tokenizer, template: Template, lost: list[str]) -> TemplateError:
    named = ", ".join(f'"{each}"' for each in lost)
    return TemplateError(
        f"The template {template.name} writes {', '.join(lost)}, and {tokenizer.name} has no such "
        "token: each would be several ordinary tokens, which the text of a message can hold too, "
        f"so that anybody could end a turn. Add them to the tokenizer with add_tokens=[{named}] or "
        'add_tokens="auto" (--add-tokens auto), or use a tokenizer that has them.'
    )


def _with_all_special(tokenizer: Tokenizer, markers: list[str]) -> Tokenizer:
    """A tokenizer that calls those of its tokens special which the template writes around turns."""
    ordinary = _tokens(tokenizer) - special_tokens_of(tokenizer).tokens.keys()
    wanted = [each for each in dict.fromkeys(markers) if each in ordinary]
    return with_special(tokenizer, wanted) if wanted else tokenizer


def _tokens(tokenizer: Tokenizer) -> set[str]:
    """The tokens that the tokenizer looks for in a text before all else.

    An ordinary piece of the vocabulary is none: whether a text gives it depends on its neighbours.
    """
    config = tokenizer.definition.config if tokenizer.definition is not None else {}
    added = (token["content"] for token in config.get("added_tokens") or [])
    return {*special_tokens_of(tokenizer).tokens, *added}


def _within(markers: Markers, text: str, group: tuple[int, int]) -> list[tuple[int, int]]:
    return [span for span in markers.find(text) if group[0] <= span[0] and span[1] <= group[1]]
