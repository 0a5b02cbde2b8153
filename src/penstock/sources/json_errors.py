"""What Python's json says of bad text, the same with every version of Python.

The log of rejected records is a part of a store, and a store must not depend on the Python that
built it. Versions differ in two ways:

- A comma before a closing bracket has a message of its own from 3.13 on.
- 3.11 refuses about 1,000 levels, fewer if its caller is deep itself; 3.13 refuses 11,000.
"""

import json
import re

MAX_LEVELS = 500
"""Python 3.11 parses as many, even if its caller is 400 calls deep."""

# The quote at the end may be missing: the last line of a file can be cut off in a string.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.S)
_BRACKET = re.compile(r"[][{}]")
_BLANKS = re.compile(r"[ \t\n\r]*")


def portable_error(error: json.JSONDecodeError) -> json.JSONDecodeError:
    """Return the error of Python 3.11 and 3.12, which name the bracket after a wrong comma."""
    if not error.msg.startswith("Illegal trailing comma"):
        return error
    bracket = _BLANKS.match(error.doc, error.pos + 1)
    of_object = error.msg.endswith("object")
    message = (
        "Expecting property name enclosed in double quotes" if of_object else "Expecting value"
    )
    return json.JSONDecodeError(message, error.doc, bracket.end() if bracket else error.pos)


def is_too_deep(text: str) -> bool:
    """Whether arrays and objects are nested in more than `MAX_LEVELS` levels."""
    if text.count("[") + text.count("{") <= MAX_LEVELS:
        return False
    level = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        level += 1 if bracket in "[{" else -1
        if level > MAX_LEVELS:
            return True
    return False
