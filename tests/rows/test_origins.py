"""From rows back to documents, input files and text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.rows import RowOrigin
from penstock.sources.slices import cut
from penstock.streaming import StreamedPlan
from penstock.transforms import TokenDropout, Transformed

LINES = [f"line {number} " * (number * 5 % 11) or "x" for number in range(80)]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("origins")
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 300)
        for name, lines in (("a", LINES[:50]), ("b", LINES[50:])):
            path = folder / f"{name}.txt"
            path.write_text("\n".join(lines))
            made.append(ps.build(path, folder / name, tokenizer="bytes", documents="lines"))
    assert all(len(store.manifest.parts) > 3 for store in made)
    return made


KINDS = {
    "windows": lambda stores: ps.Windows(stores, 16),
    "padded windows": lambda stores: ps.Windows(stores, 16, stride=7, tail="pad"),
    "packs": lambda stores: ps.Packs(stores, 24),
    "documents": lambda stores: ps.Documents(stores, 20, overflow="split"),
    "documents, left": lambda stores: ps.Documents(stores, 20, side="left"),
    "transformed": lambda stores: Transformed(ps.Windows(stores, 16), TokenDropout(0.5)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_public_way_from_a_row_to_its_documents_and_text(kind, stores):
    rows = KINDS[kind](stores)
    inner = rows.rows if isinstance(rows, Transformed) else rows
    for sample in range(len(rows)):
        found = rows.origins(sample)
        # The documents' tokens make up the row, in its order.
        joined = np.concatenate([each.store[each.document][slice(*each.span)] for each in found])
        tokens = inner[sample]["tokens"].tolist()
        at = 0 if kind != "documents, left" else len(tokens) - 1 - len(joined)
        assert tokens[at : at + len(joined)] == joined.tolist()
        assert len(joined) == sum(size for _, size in inner.spans(sample))
    assert rows.origins(-1) == rows.origins(len(rows) - 1)
    with pytest.raises(IndexError, match="is not among"):
        rows.origins(len(rows))


def test_an_origin_has_the_store_the_document_its_span_the_file_and_the_offset(stores):
    rows = ps.Documents(stores, 400)
    number = len(stores[0]) + 3  # the fourth document of the second store
    (found,) = rows.origins(number)

    assert found == RowOrigin(
        store=stores[1],
        document=3,
        span=(0, len(stores[1][3])),
        file=stores[1].origin(3).file,
        offset=stores[1].origin(3).offset,
    )
    assert found.file.endswith("b.txt")
    text = (stores[1].path.parent / "b.txt").read_bytes()
    assert text[found.offset :].decode().startswith(stores[1].decode(3))
    assert found.text().startswith(stores[1].decode(3))
    assert str(found) == (
        f"document 3 of {stores[1].path}, tokens 0 to {found.span[1]} "
        f"({found.file}, offset {found.offset})"
    )


@given(position=st.integers(0, 10**9))
def test_a_plan_finds_the_documents_at_any_position(stores, position):
    windows = {"a": ps.Windows(stores[0], 16), "b": ps.Windows(stores[1], 16)}
    plan = ps.Plan(windows, weights={"a": 3, "b": 1}, seed=5)
    (sample,) = plan.samples(position, position + 1)

    assert plan.origins(position) == windows[sample.source].origins(sample.sample)


def test_streamed_plans_find_documents_too(tmp_path):
    with ps.stream(ps.Texts(LINES), tmp_path / "s", tokenizer="bytes") as streamed:
        plan = StreamedPlan(ps.Windows(streamed, 16))
        found = plan.origins(0)
        (sample,) = plan.samples(0, 1)
    whole = ps.Windows(tmp_path / "s", 16)
    expected = whole.origins(sample.sample)
    assert [each[1:] for each in found] == [each[1:] for each in expected]


def test_rows_of_bare_token_files_have_no_origins(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(100, dtype=np.uint16))

    assert ps.Windows(tmp_path / "ids.npy", 16).origins(0) == []


def test_rows_of_your_own_may_say_their_origins():
    class Own(list):
        digest = "a name for the contents"

    class Known(Own):
        def origins(self, sample):
            return [f"row {sample}"]

    assert ps.Plan(Own("abc"), shuffle="none").origins(1) == []
    assert ps.Plan(Known("abc"), shuffle="none").origins(1) == ["row 1"]
