import pytest


class Numbers:
    """Rows that are nothing but numbered: what an order needs to know of them."""

    def __init__(self, num_rows, *, part_rows=None, num_tokens=None, digest="numbers"):
        self._num_rows = num_rows
        self.digest = digest
        if part_rows is not None:
            self.part_rows = part_rows
        if num_tokens is not None:
            self.num_tokens = num_tokens

    def __len__(self):
        return self._num_rows


@pytest.fixture(scope="session")
def numbers():
    return Numbers
