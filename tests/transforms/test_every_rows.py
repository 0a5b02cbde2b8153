"""Every transform over every kind of rows: padding is never touched, and every token can be.

Texts hold no zero and pads hold nothing else, so the tokens of a row are those that are not 0.
"""

import itertools
from collections import Counter

import numpy as np
import pytest

import penstock
from penstock.errors import PlanError
from penstock.rows.documents import Documents
from penstock.transforms import Chain, FillInTheMiddle, MaskTokens, TokenDropout, Transformed

LENGTH, EOS, MASK = 24, 256, 257
PREFIX, MIDDLE, SUFFIX = 258, 259, 260
SENTINELS = {"prefix_id": PREFIX, "middle_id": MIDDLE, "suffix_id": SUFFIX}

KINDS = {
    "windows": lambda s: penstock.Windows(s, LENGTH),
    "windows, padded": lambda s: penstock.Windows(s, LENGTH, tail="pad"),
    "windows, borders": lambda s: penstock.Windows(s, LENGTH, tail="pad", borders=True),
    "packs": lambda s: penstock.Packs(s, LENGTH),
    "packs, no borders": lambda s: penstock.Packs(s, LENGTH, borders=False),
    "documents": lambda s: Documents(s, LENGTH, pad_id=0),
    "documents, split": lambda s: Documents(s, LENGTH, overflow="split", pad_id=0),
    "documents, left": lambda s: Documents(s, LENGTH, side="left", pad_id=0),
    "documents, left, wide": lambda s: Documents(
        s, LENGTH, side="left", pad_id=0, pad_to_multiple_of=9
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """43 documents of 1 to 42 bytes and their end tokens, all but their end tokens different."""
    texts = ["".join(chr(33 + (n * 7 + k) % 90) for k in range(1 + n * 17 % 42)) for n in range(43)]
    place = tmp_path_factory.mktemp("every") / "store"
    penstock.build(penstock.Texts(texts), place, tokenizer="bytes")
    return place


def batches(rows, *, format="dict"):
    """All rows in order, as one loader gives them: pairs of inputs and targets, row by row."""
    loader = penstock.Loader(rows, 4, shuffle="none", epochs=1, drop_last=False, format=format)
    names = ("input_ids", "labels") if format == "hf" else ("inputs", "targets")
    found = []
    for batch in loader:
        found += list(zip(*(batch[name].tolist() for name in names), strict=True))
    return found[: len(rows)]


@every_kind
@pytest.mark.parametrize("format", ["dict", "hf"])
def test_every_token_is_masked_and_no_pad(store, kind, format):
    rows = KINDS[kind](store)
    masking = MaskTokens(MASK, 300, rate=1, masked=1, random=0)
    plain = batches(rows)
    for (inputs, targets), (before, _) in zip(
        batches(Transformed(rows, masking), format=format), plain, strict=True
    ):
        assert inputs == [MASK if token else 0 for token in before]
        assert targets == [token or -100 for token in before]


@every_kind
def test_some_tokens_are_masked_in_their_places(store, kind):
    rows = KINDS[kind](store)
    masking = MaskTokens(MASK, 300, rate=0.4, special_ids=[EOS], begins_word=np.arange(300) % 3 > 0)
    chosen = 0
    for (inputs, targets), (before, _) in zip(
        batches(Transformed(rows, masking)), batches(rows), strict=True
    ):
        for token, target, was in zip(inputs, targets, before, strict=True):
            assert target == was if target != -100 else token == was
            assert target == -100 or was not in (0, EOS)
            chosen += target != -100
    assert chosen > 100


@every_kind
@pytest.mark.filterwarnings("ignore:format=.hf. leaves out")
@pytest.mark.parametrize("format", ["dict", "hf"])
def test_every_token_is_dropped_and_no_pad_and_no_target(store, kind, format):
    rows = KINDS[kind](store)
    dropout = TokenDropout(1, replace_with=MASK)
    for (inputs, targets), (before, right) in zip(
        batches(Transformed(rows, dropout), format=format),
        batches(rows, format=format),
        strict=True,
    ):
        assert inputs == [MASK if token else 0 for token in before]
        # Models of Hugging Face leave the first label out.
        assert targets[format == "hf" :] == right[format == "hf" :]


@every_kind
def test_a_loss_that_is_dropped_is_one_that_was_there(store, kind):
    rows = KINDS[kind](store)
    dropped = 0
    for (inputs, targets), (before, right) in zip(
        batches(Transformed(rows, TokenDropout(0.5))), batches(rows), strict=True
    ):
        assert inputs == before
        assert all(one in (-100, other) for one, other in zip(targets, right, strict=True))
        dropped += sum(one != other for one, other in zip(targets, right, strict=True))
    assert dropped > 100


def pieces_of(fields, row, width):
    """The stretches of a row that are rearranged each for itself."""
    held = np.flatnonzero(fields["tokens"][row])
    if "document_ids" not in fields:
        return [(int(held[0]), int(held[-1]) + 1)]
    ids = fields["document_ids"][row].tolist()
    edges = [place for place in range(width) if place == 0 or ids[place] != ids[place - 1]]
    stops = [min(stop, int(held[-1]) + 1) for stop in (*edges[1:], width)]
    return [(start, stop) for start, stop in zip(edges, stops, strict=True) if stop > start]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "packs, no borders"])
def test_documents_are_rearranged_each_in_its_place(store, kind):
    rows = KINDS[kind](store)
    samples = np.arange(len(rows))
    fields = rows.read(samples)
    within = "documents" if "document_ids" in fields else "row"
    middle = FillInTheMiddle(**SENTINELS, rate=1, eos_id=EOS, within=within)
    got = Transformed(rows, middle).read(samples)
    for row in range(len(rows)):
        before, after = fields["tokens"][row].tolist(), got["tokens"][row].tolist()
        assert [token == 0 for token in after] == [token == 0 for token in before]
        for start, stop in pieces_of(fields, row, rows.length):
            one, two = before[start:stop], after[start:stop]
            ended = one[-1] == EOS
            if len(one) - ended <= 3:
                assert two == one
                continue
            assert two[0] == PREFIX
            assert not ended or two[-1] == EOS
            one[len(one) - ended - 3 : len(one) - ended] = [PREFIX, MIDDLE, SUFFIX]
            assert Counter(two) == Counter(one)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "packs, no borders"])
def test_targets_of_rearranged_documents_are_what_follows(store, kind):
    rows = KINDS[kind](store)
    within = "documents" if "document_ids" in rows.read(np.arange(1)) else "row"
    middle = FillInTheMiddle(**SENTINELS, rate=1, eos_id=EOS, within=within)
    plain = batches(rows)
    trained = 0
    for (inputs, targets), (_, right) in zip(
        batches(Transformed(rows, middle)), plain, strict=True
    ):
        for place, (one, two) in enumerate(itertools.pairwise(inputs)):
            assert targets[place] in (two, -100), one
        for target, before in zip(targets[:-1], right[:-1], strict=True):
            assert (target == -100) == (before == -100)
        trained += sum(target == EOS for target in targets)
    assert trained > 10


@pytest.mark.parametrize("transform", ["mask", "words", "drop", "loss", "middle"])
def test_a_document_is_changed_alike_on_whichever_side_and_to_whatever_width(store, transform):
    changed = {
        "mask": MaskTokens(MASK, 300, rate=0.5, masked=0.5, random=0.5),
        "words": MaskTokens(MASK, 300, rate=0.5, begins_word=np.arange(300) % 3 > 0),
        "drop": TokenDropout(0.5, replace_with=MASK),
        "loss": TokenDropout(0.5),
        "middle": FillInTheMiddle(**SENTINELS, rate=0.5, eos_id=EOS, within="row"),
    }[transform]
    found = []
    for options in ({}, {"side": "left"}, {"side": "left", "pad_to_multiple_of": 9}):
        rows = Documents(store, LENGTH, pad_id=0, **options)
        read = Transformed(rows, changed, seed=3).read(np.arange(len(rows)))
        real = read["attention_mask"].astype(bool)
        counted = read["same_document"] if "labels" not in read else real
        counted = counted & read.get("target_mask", True)
        found.append(
            [
                (read["tokens"][row, :-1][real[row]].tolist(), counted[row][real[row]].tolist())
                for row in range(len(rows))
            ]
        )

    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", ["packs", "packs, no borders"])
def test_rows_of_several_documents_are_not_rearranged_as_one(store, kind):
    middle = FillInTheMiddle(**SENTINELS, rate=1, within="row")

    with pytest.raises(PlanError, match=r"document_ids|from one document into another"):
        Transformed(KINDS[kind](store), middle).read(np.arange(1))


def test_several_documents_are_also_found_by_same_document():
    fields = {
        "tokens": np.arange(1, 10, dtype=np.uint16)[None],
        "attention_mask": np.ones((1, 8), np.uint8),
        "same_document": np.array([[True] * 3 + [False] + [True] * 3 + [False]]),
    }
    middle = FillInTheMiddle(**SENTINELS, rate=1, within="row")

    with pytest.raises(PlanError, match="would move tokens from one document into another"):
        middle.apply(fields, np.zeros(1, np.uint64), 8)


@every_kind
def test_masked_tokens_may_lose_their_loss_and_nothing_else(store, kind):
    rows = KINDS[kind](store)
    masking = MaskTokens(MASK, 300, rate=1, masked=1, random=0)
    both = Transformed(rows, Chain(masking, TokenDropout(0.5)))
    for (inputs, targets), (before, _) in zip(batches(both), batches(rows), strict=True):
        assert inputs == [MASK if token else 0 for token in before]
        assert all(
            target in (-100, token or -100) for target, token in zip(targets, before, strict=True)
        )
