import gzip

import pytest
import xxhash

from penstock.options import ReadSettings
from penstock.sources import read
from penstock.sources.listing import list_inputs
from penstock.sources.read import SpanDigests, read_slice
from penstock.sources.slices import cut
from penstock.store.inputs import piece_digests

LINES = b"".join(b'{"text": "line %d"}\n' % number for number in range(3_000))
CASES = {
    "a.jsonl": (LINES, ReadSettings()),
    "lines.txt": (b"\xef\xbb\xbf" + LINES, ReadSettings(documents="lines")),
    "separated.txt": (LINES.replace(b"\n", b"<|endoftext|>\r\n"), ReadSettings()),
    "whole.txt": (LINES, ReadSettings()),
    "bad.txt": (LINES + b"\xff\n" + LINES, ReadSettings(documents="lines")),
    "empty.txt": (b"", ReadSettings()),
}


def slices_of(path, reading):
    files = list_inputs([str(path)], reading).files
    for piece in cut(files, reading, slice_bytes=20_000, is_cut_safe=lambda left, right: True):
        digests = SpanDigests()
        for _ in read_slice(files, piece, reading, None, digests):
            pass
        yield files, piece.spans, digests


@pytest.mark.parametrize("name", CASES)
def test_the_digest_of_what_was_read_is_the_digest_of_the_file(name, tmp_path, monkeypatch):
    monkeypatch.setattr(read, "BLOCK_BYTES", 1 << 12)
    data, reading = CASES[name]
    (tmp_path / name).write_bytes(data)
    num_known = 0
    for files, spans, digests in slices_of(tmp_path / name, reading):
        for span in spans:
            known = digests.digest(span)
            num_known += known is not None
            right = xxhash.xxh3_128_hexdigest(data[span.start : span.stop])
            assert known in (right, None)
        assert piece_digests(files, spans, digests) == piece_digests(files, spans)
    assert num_known == (0 if name == "empty.txt" else round(len(data) / 20_000))


def test_text_that_a_span_carries_is_digested_as_before(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(LINES))

    for files, spans, digests in slices_of(tmp_path / "a.txt.gz", ReadSettings(documents="lines")):
        assert [digests.digest(span) for span in spans] == [None] * len(spans)
        assert piece_digests(files, spans, digests) == piece_digests(files, spans)
