"""Requests for rows of the next block: they hold the pages of each row, and no page twice."""

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rows.blocks import load_ahead

if not hasattr(mmap, "MADV_WILLNEED"):
    pytest.skip("this system has no madvise", allow_module_level=True)

SIZE, HEADER, ROW = 40 * mmap.PAGESIZE + 100, 128, 1025


class Recorded(mmap.mmap):
    """A map that remembers what was requested."""

    def madvise(self, option, start, length):
        self.requests.append((start, start + length))
        super().madvise(option, start, length)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, (SIZE - HEADER) // 2 - ROW))))
def test_requests_hold_the_pages_of_all_rows_once(rows):
    maps = [Recorded(-1, SIZE) for _ in range(3)]
    for each in maps:
        each.requests = []
    pieces = [np.frombuffer(each, np.uint8)[HEADER:].view(np.uint16) for each in maps]
    numbers, starts = np.array(rows, np.int64).reshape(-1, 2).T

    load_ahead(pieces.__getitem__, numbers, starts, ROW, np.zeros(len(rows), bool))

    for number, each in enumerate(maps):
        needed = set()
        for piece, start in rows:
            if piece == number:
                first, last = HEADER + 2 * start, HEADER + 2 * (start + ROW) - 1
                needed |= {*range(first // mmap.PAGESIZE, last // mmap.PAGESIZE + 1)}
        requested = [
            page
            for first, stop in each.requests
            for page in range(first // mmap.PAGESIZE, -(-stop // mmap.PAGESIZE))
        ]
        assert len(requested) == len(set(requested))
        assert all(first % mmap.PAGESIZE == 0 and stop <= SIZE for first, stop in each.requests)
        assert set(requested) == needed
