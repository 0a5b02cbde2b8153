"""Names computed from contents.

A digest answers "is this the same thing?" across machines, versions and years, so
it is always SHA-256 of bytes whose layout is written down: of a file as it lies on
disk, or of JSON in one canonical spelling (sorted keys, no spaces, ASCII). Keys for
the order of the data are derived the same way, from labelled parts, so two uses can
never share a key by accident.
"""

import hashlib
import json
from typing import Any

__all__ = ["canonical_json", "derive_key", "digest_bytes", "digest_json"]


def canonical_json(value: Any) -> bytes:
    r"""The one spelling of `value` as JSON that digests are taken of.

    >>> canonical_json({"b": 1, "a": [1, "é"]})
    b'{"a":[1,"\\u00e9"],"b":1}'
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def digest_bytes(data: bytes) -> str:
    """SHA-256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    """SHA-256 of the canonical spelling of `value`.

    >>> digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})
    True
    """
    return digest_bytes(canonical_json(value))


def derive_key(*labels: str | int) -> int:
    """A 64-bit key that belongs to this list of labels and to no other.

    The labels are spelled as a JSON list first, so `("a", "b")` and `("ab",)` differ.

    >>> derive_key("shuffle", "web", 17) == derive_key("shuffle", "web", 17)
    True
    >>> derive_key("a", "b") == derive_key("ab")
    False
    """
    return int.from_bytes(hashlib.sha256(canonical_json(list(labels))).digest()[:8], "little")
