"""What a manifest may say.

A store may come from anywhere, so its manifest is data to be judged, not trusted: every
field that penstock reads later is looked at once, with limits, before anything is
allocated or opened. Errors here are plain; `read_manifest` says which file they are about.
"""

import re
from typing import Any

from penstock.store.npy import HEADER_BYTES

__all__ = ["check_contents", "check_part"]

_HEX = re.compile(r"[0-9a-f]{64}")
_MAX_COUNT = 2**62
_MAX_VOCAB = 2**32


def check_contents(contents: dict[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError where a field is absent, odd or out of range."""
    vocab_size = _check_tokenizer(contents["tokenizer"])
    if contents["dtype"] == "uint16" and vocab_size > 65_536:
        raise ValueError(f"a vocabulary of {vocab_size:,} does not fit uint16")
    for name in ("eos_id", "bos_id"):
        if contents[name] is not None:
            _count(contents[name], name, vocab_size)
    if contents["split"] is not None:
        _string(contents["split"], "split")
    if "chat" in contents:
        _string(contents["chat"]["template"], "chat.template")
        _digest(contents["chat"]["digest"], "chat.digest")
    if not contents["builds"]:
        raise ValueError("no build is listed")
    for number, done in enumerate(contents["builds"]):
        _check_build(done, f"builds[{number}]")
    for name in ("documents", "tokens", *({"pieces"} & set(contents["counts"]))):
        _count(contents["counts"][name], f"counts.{name}")


def _check_tokenizer(tokenizer: dict[str, Any]) -> int:
    """Raise where the tokenizer is described oddly; returns the size of its vocabulary."""
    _string(tokenizer["name"], "tokenizer.name")
    _string(tokenizer["canary"], "tokenizer.canary")
    vocab_size = _count(tokenizer["vocab_size"], "tokenizer.vocab_size", _MAX_VOCAB)
    if tokenizer["digest"] is not None:
        _string(tokenizer["digest"], "tokenizer.digest")
    for token, number in tokenizer.get("added_tokens", {}).items():
        _count(number, f"tokenizer.added_tokens[{token!r:.40}]", vocab_size - 1)
    return vocab_size


def _check_build(done: dict[str, Any], place: str) -> None:
    _count(done["slices"], f"{place}.slices")
    for name, value in done["counts"].items():
        _count(value, f"{place}.counts.{name}")
    _count(done["rejects"]["bytes"], f"{place}.rejects.bytes")
    _digest(done["rejects"]["sha256"], f"{place}.rejects.sha256")
    for reason, value in done["rejects"]["reasons"].items():
        _count(value, f"{place}.rejects.reasons.{reason}")
    for rule, value in done.get("documents", {}).items():
        _count(value, f"{place}.documents.{rule}")
    if not isinstance(done["reading"], dict):
        raise ValueError(f"{place}.reading is {done['reading']!r:.60}")
    for each in done["inputs"]:
        _string(each["name"], f"{place}.inputs.name")
        _count(each["bytes"], f"{place}.inputs.bytes")


def check_part(entry: dict[str, Any], dtype: str) -> None:
    """Raise where the record of a part is odd, or its files cannot be as long as it says."""
    number, documents, tokens = counts = entry["part"], entry["documents"], entry["tokens"]
    if not all(type(count) is int and 0 <= count <= _MAX_COUNT for count in counts):
        raise ValueError(f"a count of part {number!r:.60} is out of range")
    if "continued" in entry:
        _count(entry["continued"], f"continued of part {number}", documents)
    sizes = {
        "tokens": HEADER_BYTES + tokens * (2 if dtype == "uint16" else 4),
        "bounds": HEADER_BYTES + documents * 8,
        "origin": HEADER_BYTES + documents * 16,
        "loss": HEADER_BYTES + tokens,
    }
    files = entry["files"]
    if not {"tokens", "bounds", "origin"} <= set(files) <= set(sizes):
        raise ValueError(f"part {number} has the files {sorted(files)}")
    for kind, (size, digest) in files.items():
        if type(size) is not int or size != sizes[kind]:
            raise ValueError(f"part {number} says {size!r:.60} bytes of {kind}, not {sizes[kind]}")
        if not _HEX.fullmatch(digest):
            raise ValueError(f"part {number} has no digest of its {kind}")


def _count(value: Any, name: str, limit: int = _MAX_COUNT) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{name} is {value!r:.60}")
    return value


def _string(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.60}")


def _digest(value: Any, name: str) -> None:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"{name} is no digest: {value!r:.80}")
