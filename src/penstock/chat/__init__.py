"""Conversations to tokens and a loss mask.

Takes messages and a chat template, gives the ids a model is trained on and one bit a
token: is it the assistant's? Promises that the bit follows the characters of the
rendered text, found in two ways that must agree; that text which only spells a special
token stays text; and that a template whose turns cannot be told apart is refused, never
masked by guess.
"""
