"""The XXH3-128 of the text of a slice, computed from the blocks that its reader has just read.

A build records a digest of each of its inputs. A block that was just read is still in the
processor's cache, so to digest it there saves reading all inputs a second time.
"""

from dataclasses import dataclass, field

import xxhash

from penstock.sources.slices import InputSpan


@dataclass(slots=True)
class SpanDigests:
    """Digests of spans whose bytes are added from the first to the last; not for several threads.

    A reader may skip bytes, such as those of a record that is too long. Then the span has no digest
    here, and the file has to be read again.
    """

    _spans: dict[tuple[int, int], "_Span"] = field(default_factory=dict)

    def add(self, span: InputSpan, place: int, data: bytes) -> None:
        """Add the bytes of a file that begin at `place`."""
        known = self._spans.setdefault((span.file, span.start), _Span(span.start))
        if known.place == place:
            known.place += len(data)
            known.digest.update(data)

    def digest(self, span: InputSpan) -> str | None:
        """The XXH3-128 of a span as hexadecimal digits; None if some of its bytes are missing."""
        known = self._spans.get((span.file, span.start))
        return known.digest.hexdigest() if known and known.place == span.stop else None


@dataclass(slots=True)
class _Span:
    """A span of which the bytes before `place` were added."""

    place: int
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
