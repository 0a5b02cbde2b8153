"""Files that other packages wrote are read with equal documents."""

import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.formats import verify_tokens

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED["documents"])
def test_files_of_other_packages_are_read_with_equal_documents(name):
    options = EXPECTED["options"].get(name, {})
    opened = ps.open_tokens(FIXTURES / name, vocab_size=100, **options)

    assert opened.format == name.partition("-")[0]
    assert [each.tolist() for each in opened] == EXPECTED["documents"][name]
    assert verify_tokens(opened) == sum(map(len, EXPECTED["documents"][name]))


@pytest.mark.parametrize("size", [2, 4])
def test_loss_masks_of_datatrove_are_read(size):
    opened = ps.open_tokens(FIXTURES / f"datatrove-{size}.ds")

    assert (opened.part_loss(0) == (opened.part_ids(0) % 2 == 0)).all()


@pytest.mark.parametrize("name", ["arrow-masked", "parquet-masked"])
def test_labels_and_masks_of_datasets_are_read(name):
    opened = ps.open_tokens(FIXTURES / name, vocab_size=100)

    for part in range(len(opened.part_tokens)):
        ids = opened.part_ids(part)[:]
        assert opened.part_loss(part).tolist() == ((ids % 3 > 0) & (ids % 5 > 0)).tolist()


def test_fixtures_of_several_files_are_sets():
    for name in ("mds-int32", "litdata-uint16", "arrow-int64"):
        assert len(ps.open_tokens(FIXTURES / name).part_tokens) > 1
