"""Documents and batches of every format that is opened in place."""

import json
from pathlib import Path

import pytest
from goldens import GOLDENS, contents

import penstock as ps

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
LAYOUTS = ["llmc", "nanogpt", "olmo", "npy", "megatron", "old-megatron", "datatrove"]
LAYOUTS += ["mds", "mds-zstd", "litdata", "litdata-zstd", "arrow", "parquet"]


@pytest.mark.parametrize("name", EXPECTED["documents"])
def test_files_of_other_packages_have_the_same_batches_for_ever(name):
    options = EXPECTED["options"].get(name, {})

    opened = ps.open_tokens(FIXTURES / name, vocab_size=100, **options)

    assert contents(opened) == GOLDENS[f"fixture {name}"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_same_documents_and_batches_for_ever(layouts, layout, tmp_path):
    documents = [[(n * 37 + k * k * 61) % 100 for k in range(n * 11 % 40)] for n in range(1, 40)]
    path, options = layouts.write(layout, tmp_path, documents)

    assert contents(ps.open_tokens(path, vocab_size=100, **options)) == GOLDENS[f"layout {layout}"]
