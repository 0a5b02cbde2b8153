"""Converts conversations to tokens and loss masks.

Takes messages and a chat template, and returns token ids and, for each token, whether it is trained
on. The mask is computed from the characters that the assistant wrote. penstock finds these
characters in two ways, and refuses a conversation if the two results differ. A special token in the
text of a message stays text. If penstock cannot find the turns that a template writes, it refuses
the template instead of guessing a mask.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.chat.chat import Chat as Chat
    from penstock.chat.chat import Rendered as Rendered
    from penstock.chat.chat import render as render
    from penstock.chat.messages import to_conversation as to_conversation
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__, {"chat": "Chat Rendered render", "messages": "to_conversation"}
    )
