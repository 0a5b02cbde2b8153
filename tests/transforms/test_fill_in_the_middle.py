import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.transforms import FillInTheMiddle, row_keys

PREFIX, MIDDLE, SUFFIX, EOS = 101, 102, 103, 100
SENTINELS = {"prefix_id": PREFIX, "middle_id": MIDDLE, "suffix_id": SUFFIX}


def slow_piece(slow, piece, key, *, rate, spm_rate, eos_id):
    """One document, with lists: what comes in its place, and whether it was changed."""
    end = piece[-1:] if eos_id is not None and piece and piece[-1] == eos_id else []
    body = piece[: len(piece) - len(end)]
    if len(body) <= 3 or not slow.happens(key, 0, rate):
        return piece, False
    kept = body[:-3]
    low, high = sorted(slow.below(key, place, len(kept) + 1) for place in (2, 3))
    prefix, middle, suffix = kept[:low], kept[low:high], kept[high:]
    if slow.happens(key, 1, spm_rate):
        return [PREFIX, SUFFIX, *suffix, MIDDLE, *prefix, *middle, *end], True
    return [PREFIX, *prefix, SUFFIX, *suffix, MIDDLE, *middle, *end], True


def pieces_of(documents):
    """Where the documents of one row begin and end."""
    starts = [p for p, each in enumerate(documents) if p == 0 or each != documents[p - 1]]
    return list(zip(starts, [*starts[1:], len(documents)], strict=True))


@given(
    st.integers(0, 2**30),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([None, EOS]),
    st.integers(1, 24),
)
def test_rearranging_documents_equals_slicing_lists(slow, seed, rate, spm_rate, eos_id, length):
    generator = np.random.default_rng(seed)
    tokens = generator.integers(EOS - 8, EOS + 1, (4, length + 1)).astype(np.uint16)
    documents = np.cumsum(generator.random((4, length)) < 0.15, axis=1)
    keys = row_keys(seed, "rows", np.arange(4))
    middle = FillInTheMiddle(**SENTINELS, rate=rate, spm_rate=spm_rate, eos_id=eos_id)
    got = middle.apply({"tokens": tokens, "document_ids": documents}, keys, length)

    for row, key in enumerate(keys.tolist()):
        expected, changed = [], False
        for start, stop in pieces_of(documents[row].tolist()):
            piece, changed = slow_piece(
                slow,
                tokens[row, start:stop].tolist(),
                slow.subkey(key, start),
                rate=rate,
                spm_rate=spm_rate,
                eos_id=eos_id,
            )
            expected += piece
        assert got["tokens"][row].tolist() == [*expected, tokens[row, length]]
        assert got["target_mask"][row].tolist() == [True] * (length - 1) + [not changed]


@given(st.integers(0, 2**30), st.integers(1, 30))
def test_tokens_are_conserved_but_for_the_three_before_the_end(seed, length):
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 90, (6, length)).astype(np.uint16)
    documents = np.cumsum(generator.random((6, length)) < 0.1, axis=1)
    fields = {"tokens": tokens, "document_ids": documents}
    middle = FillInTheMiddle(**SENTINELS, rate=0.7)
    got = middle.apply(fields, row_keys(seed, "", np.arange(6)))["tokens"]

    for row in range(6):
        for start, stop in pieces_of(documents[row].tolist()):
            before, after = tokens[row, start:stop].tolist(), got[row, start:stop].tolist()
            if after != before:
                before[-3:] = [PREFIX, MIDDLE, SUFFIX]
            assert Counter(after) == Counter(before)


def undone(tokens):
    """The text that a rearranged piece was made of."""
    tokens = list(tokens)
    assert tokens[0] == PREFIX
    second, third = tokens.index(SUFFIX), tokens.index(MIDDLE)
    prefix, suffix, rest = tokens[1:second], tokens[second + 1 : third], tokens[third + 1 :]
    return prefix + rest + suffix


@pytest.mark.parametrize("spm_rate", [0, 1])
def test_the_text_can_be_put_together_again(spm_rate):
    tokens = np.tile(np.arange(30, dtype=np.uint16), (500, 1))
    middle = FillInTheMiddle(**SENTINELS, rate=1, spm_rate=spm_rate, within="row")
    got = middle.apply({"tokens": tokens}, row_keys(1, "", np.arange(500)))["tokens"]

    assert all(undone(row) == list(range(27)) for row in got.tolist())
    assert ((got[:, 1] == SUFFIX).mean() > 0.9) == (spm_rate == 1)


def test_rates_and_cuts_are_as_asked():
    tokens = np.tile(np.arange(13, dtype=np.uint16), (20_000, 1))
    middle = FillInTheMiddle(**SENTINELS, rate=0.4, spm_rate=0, within="row")
    got = middle.apply({"tokens": tokens}, row_keys(1, "", np.arange(20_000)))["tokens"]
    changed = got[got[:, 0] == PREFIX]
    assert abs(len(changed) / 20_000 - 0.4) < 3 * (0.24 / 20_000) ** 0.5

    # Ten tokens have 11 gaps: the smaller of two uniform draws is 0 in 21 cases of 121.
    empty = (changed[:, 1] == SUFFIX).mean()
    assert abs(empty - 21 / 121) < 3 * (21 * 100 / 121**2 / len(changed)) ** 0.5


def test_whole_rows_take_the_token_after_the_inputs_with_them():
    tokens = np.tile(np.arange(30, dtype=np.uint16), (5, 1))
    middle = FillInTheMiddle(**SENTINELS, rate=1, within="row")
    got = middle.apply({"tokens": tokens}, row_keys(1, "", np.arange(5)), 29)

    assert list(got) == ["tokens"]
    assert all(undone(row) == list(range(27)) for row in got["tokens"].tolist())


@pytest.mark.parametrize("within", ["row", "documents"])
def test_padding_of_a_short_row_stays_behind_the_text(within):
    tokens = np.zeros((2, 13), np.uint16)
    tokens[0], tokens[1, :8] = np.arange(13), np.arange(8)
    fields = {"tokens": tokens, "num_targets": np.array([12, 7])}
    if within == "documents":
        fields["document_ids"] = (np.arange(12) >= 8) * np.array([[0], [1]])
    middle = FillInTheMiddle(**SENTINELS, rate=1, within=within)
    got = middle.apply(fields, row_keys(1, "", [0, 1]), 12)

    assert undone(got["tokens"][1, :8].tolist()) == list(range(5))
    assert got["tokens"][1, 8:].tolist() == [0] * 5
    if within == "documents":
        assert got["target_mask"][:, -1].tolist() == [False, True]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_rows_are_rearranged_alike_however_they_are_split_into_calls(made, sizes):
    rows = made(sum(sizes), 20, documents=True)
    keys = row_keys(0, "", np.arange(len(rows)))
    middle = FillInTheMiddle(**SENTINELS, rate=0.8)
    whole = middle.apply(rows.fields, keys, 20)

    dealt = np.random.default_rng(1).permutation(len(rows))
    for part in np.split(dealt, np.cumsum(sizes)[:-1]):
        got = middle.apply(rows.read(part), keys[part], 20)
        assert all(np.array_equal(got[name], whole[name][part]) for name in whole)


def test_what_was_given_stays_as_it_was_and_no_rows_are_no_trouble(made):
    rows = made(documents=True)
    before = rows.fields["tokens"].copy()
    middle = FillInTheMiddle(**SENTINELS, rate=1)
    middle.apply(rows.fields, row_keys(0, "", np.arange(len(rows))), rows.length)
    got = middle.apply(rows.read(np.zeros(0, int)), np.zeros(0, np.uint64), rows.length)

    assert np.array_equal(rows.fields["tokens"], before)
    assert got["tokens"].shape == (0, 13)


def test_every_setting_is_described():
    settings = [
        {}, {"rate": 0.1}, {"spm_rate": 0.1}, {"within": "row"}, {"eos_id": 0},
        {"prefix_id": 7}, {"middle_id": 7}, {"suffix_id": 7},
    ]  # fmt: skip
    found = [FillInTheMiddle(**{**SENTINELS, **each}) for each in settings]

    assert len({repr(each.describe()) for each in found}) == len(found)
    assert repr(found[0]) == "FillInTheMiddle(0.5 of the documents, 0.5 of them SPM)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 2}, "rate must be a probability from 0 to 1; got 2."),
        ({"spm_rate": -1}, "spm_rate must be a probability from 0 to 1; got -1."),
        ({"suffix_id": PREFIX}, "must be three different ids, 0 or more; got (101, 102, 101)."),
        ({"within": "rows"}, 'within must be "documents" or "row"; got \'rows\'.'),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        FillInTheMiddle(**{**SENTINELS, **settings})


def test_rows_that_do_not_know_their_documents_are_refused(made):
    with pytest.raises(
        PlanError, match=r"Use Packs or Windows with borders=True, or within=\"row\""
    ):
        FillInTheMiddle(**SENTINELS).apply(made().fields, row_keys(0, "", np.arange(40)), 12)


def test_whole_rows_are_not_rearranged_across_known_borders(made):
    fields = made(documents=True).fields
    with pytest.raises(PlanError, match="would make 'document_ids' of these rows wrong"):
        FillInTheMiddle(**SENTINELS, within="row").apply(fields, row_keys(0, "", np.arange(40)), 12)
