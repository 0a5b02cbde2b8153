r"""The special tokens of a tokenizer, and the markers of a template that must be special tokens.

A marker is text with which a template begins or ends something, such as `<|im_end|>` after a turn.
Text is split at special tokens before anything else, exactly as Hugging Face's tokenizers do it,
with one difference: only the template can write a special token. If a user's message contains
`<|im_end|>`, these are ten characters of text, and cannot end the user's turn.

    <|im_start|>user\nZqvi alpha?<|im_end|>\n<|im_start|>assistant\nZqwo beta.<|im_end|>\n
    └ marker ──┘                 └ markers ────────────┘                      └── end ─┘

A marker that is not a token is encoded as several ordinary tokens. Anybody who writes a message can
write the same tokens, and so end a turn that is not theirs. And a short conversation grows by a
quarter: the second example of GSM8K from 90 tokens to 114. So `tokenizer_with_markers` requires:

- The marker that ends a turn of the assistant must be a token.
- All markers of a built-in template must be tokens.
- Other markers that look like tokens (`<|user|>`, in a template that ends turns with `</s>`) may be
  text, as they are for the models that were published with such templates; a warning is logged.

If a marker is a token that the tokenizer does not flag as special, a chat treats it as special:
only the template can write it.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator

from penstock.chat.messages import ANSWER, ChatText, Span, gaps
from penstock.chat.template import Template
from penstock.errors import TemplateError
from penstock.tokenize.definition import Config
from penstock.tokenize.engines import ObjectEngine
from penstock.tokenize.tokenizer import Tokenizer, load_tokenizer, with_special

_log = logging.getLogger("penstock")

_COMMON_MARKERS = (
    r"<\|[^|<>\s]{1,40}\|>",
    "<\uff5c[^\uff5c<>]{1,40}\uff5c>",  # with the wide bars of DeepSeek
    r"</?[A-Za-z_][\w:.-]{0,40}>",
    r"\[/?[A-Z][A-Z_]{1,30}\]",
)
# Text that looks like a token: <|im_end|>, also with the wide bars of DeepSeek.
_CONTROL = re.compile("<\\|[\\w/:.-]{1,40}\\|>|<\uff5c[\\w/:.\u2581 -]{1,40}\uff5c>")
# Markers of reasoning, such as <think>, may also be in the content of a message.
_REASONING = re.compile("think|thought|reason", re.IGNORECASE)
# White space as Rust defines it; Python's `strip` removes four more control characters.
_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


class Markers:
    """Finds markers in a text: special tokens, and text that looks like one."""

    def __init__(self, special: Iterable[str]) -> None:
        # The longest tokens come first, because `re` takes the first alternative that matches.
        self._known = tuple(sorted(filter(None, special), key=len, reverse=True))
        self._pattern = re.compile("|".join([*map(re.escape, self._known), *_COMMON_MARKERS]))

    def is_end(self, text: str) -> bool:
        """Whether `text` ends with a special token, or with text that looks like one."""
        # A marker that is not a token of this tokenizer is recognised by the "|>" at its end.
        return text.endswith((*self._known, "|>", "\uff5c>"))

    def find(self, text: str) -> Iterator[Span]:
        """The spans of the markers in `text`."""
        return (found.span() for found in self._pattern.finditer(text))

    def first_group(self, text: str) -> list[Span]:
        """The spans of the first marker in `text`, and of the markers that follow it directly."""
        group: list[Span] = []
        for span in self.find(text):
            if group and span[0] != group[-1][1]:
                break
            group.append(span)
        return group


class TokenFinder:
    """Finds the special tokens of one tokenizer in a text.

    If the tokenizer is an object of another library, its special tokens are those that it reports
    and those that penstock added.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = _special_tokens(tokenizer)
        # The longest tokens come first, because tokenizers prefer them. If there are no tokens, the
        # pattern never matches.
        names = sorted(self.tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def find(self, chat: ChatText, *, anywhere: bool) -> Iterator[tuple[int, Span, Span]]:
        """The special tokens in the text of the template; with `anywhere`, also in the content.

        Yields for each token its id, its span, and the span extended by the blanks that it strips.
        """
        text = chat.text
        done = 0
        for begin, end in [(0, len(text))] if anywhere else _template_spans(chat):
            for found in self._pattern.finditer(text, begin, end):
                token = self.tokens[found.group()]
                start, stop = span = found.span()
                beside = text[max(0, start - 1) : start] + text[stop : stop + 1]
                if token.get("single_word") and re.search(r"\w", beside):
                    continue
                # Blanks that the token strips are not encoded as text; `done` keeps two tokens from
                # taking the same blanks.
                if token.get("lstrip"):
                    start = max(done, len(text[:start].rstrip(_BLANKS)))
                if token.get("rstrip"):
                    stop = len(text) - len(text[stop:].lstrip(_BLANKS))
                yield token["id"], span, (start, stop)
                done = stop

    def is_in_content(self, chat: ChatText) -> bool:
        """Whether the content of the messages contains the text of a special token."""
        # A token that begins in the template's text and ends in the content counts, too.
        everywhere = self._spans(chat.text, 0, len(chat.text))
        ours = (self._spans(chat.text, *span) for span in _template_spans(chat))
        return everywhere != set().union(*ours)

    def _spans(self, text: str, begin: int, end: int) -> set[Span]:
        return {found.span() for found in self._pattern.finditer(text, begin, end)}


def _template_spans(chat: ChatText) -> Iterator[Span]:
    """The spans of the text that the template wrote."""
    return gaps(chat.content, 0, len(chat.text))


def _special_tokens(tokenizer: Tokenizer) -> dict[str, Config]:
    """The special tokens, with their ids and the flags that a tokenizer.json has for them."""
    definition, engine = tokenizer.definition, tokenizer.engine
    if definition is None:
        known = engine.description.special_tokens if isinstance(engine, ObjectEngine) else {}
        ids = {**known, **tokenizer.added_tokens}
        return {text: {"id": number} for text, number in ids.items()}
    added = {each["content"]: each for each in definition.added_tokens}
    found = {}
    for text in definition.special_tokens:
        number = definition.token_id(text)
        # `tokenizers` treats the unknown token as special only if it is flagged so.
        if number is not None and (text in added or text != definition.unk_token):
            found[text] = {**added.get(text, {}), "id": number}
    return found


def tokenizer_with_markers(
    tokenizer: Tokenizer, template: Template, sample: str, markers: Markers, *, add: bool
) -> Tokenizer:
    """`tokenizer` with the markers of the template as special tokens.

    Args:
        tokenizer: The user's tokenizer.
        template: The template.
        sample: The text that the template renders for a question and an answer; "" if unknown.
        markers: Finds markers in `sample`.
        add: Whether to add the tokens that are missing.

    Raises:
        TemplateError: tokens are missing, and `add` is false.
    """
    known = _searched_tokens(tokenizer)
    written = [sample[slice(*span)] for span in markers.find(sample)]
    tail = sample.partition(ANSWER)[2]
    # The markers that end a turn: <|im_end|>, or several such as </s><s>.
    end = [tail[start:stop] for start, stop in markers.first_group(tail)]
    # Without any end marker there is nothing to protect; one token among several is enough.
    ends_with_token = not end or not known.isdisjoint(end)
    missing = [
        each
        for each in dict.fromkeys([*written, *_CONTROL.findall(template.source)])
        if each not in known and (_CONTROL.fullmatch(each) or (each in end and not ends_with_token))
    ]
    # `missing` has the markers that look like tokens, and those that end a turn if none of them is
    # a token. A tag such as <tools> may stay text.
    if add:
        tokenizer = load_tokenizer(tokenizer, add_tokens=missing)
    elif missing and (template.is_builtin or not ends_with_token):
        raise TemplateError(
            f"The template {template.name} writes {', '.join(missing)}, and {tokenizer.name} has "
            "no such token: each would be several ordinary tokens, and the text of a message can "
            "contain the same tokens and end a turn. Add them to the tokenizer with "
            f'add_tokens={json.dumps(missing)} or add_tokens="auto" (--add-tokens auto), or use a '
            "tokenizer that has them."
        )
    elif ordinary := [each for each in missing if each in written]:
        _log.warning(
            f"The template {template.name} writes {', '.join(ordinary)}, which {tokenizer.name} "
            "has no token for: the text of a message can contain the same tokens. Unless the model "
            'was trained this way, add_tokens="auto" (--add-tokens auto) makes each a token.'
        )
    unflagged = _searched_tokens(tokenizer) - _special_tokens(tokenizer).keys()
    more = [each for each in dict.fromkeys(written) if each in unflagged]
    more = [each for each in more if not _REASONING.search(each)]
    return with_special(tokenizer, more) if more else tokenizer


def _searched_tokens(tokenizer: Tokenizer) -> set[str]:
    """The tokens that the tokenizer finds in a text before it splits the rest into words.

    Ordinary tokens are not included: whether one is found depends on the characters around it.
    """
    added = tokenizer.definition.added_tokens if tokenizer.definition is not None else []
    return {*_special_tokens(tokenizer), *(token["content"] for token in added)}
