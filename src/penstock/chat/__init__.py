"""Conversations to tokens and a loss mask.

Takes messages and a chat template, gives the ids a model is trained on and one bit a
token: is it the assistant's? Promises that the bit follows the characters of the
rendered text, found in two ways that must agree; that text which only spells a special
token stays text; and that a template whose turns cannot be told apart is refused, never
masked by guess.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazy_exports

if TYPE_CHECKING:
    from penstock.chat.chat import Chat as Chat
    from penstock.chat.chat import Rendered as Rendered
    from penstock.chat.chat import render as render
    from penstock.chat.messages import Conversation as Conversation
    from penstock.chat.messages import to_conversation as to_conversation
    from penstock.chat.template import Template as Template
    from penstock.chat.template import load_template as load_template
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "chat": "Chat Rendered render",
            "messages": "Conversation to_conversation",
            "template": "Template load_template",
        },
    )
