import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.transforms import Chain, MaskTokens, TokenDropout, row_keys


@given(st.integers(0, 2**30), st.sampled_from([0.0, 0.3, 1.0]))
def test_dropping_equals_a_loop_over_tokens(slow, seed, rate):
    tokens = np.random.default_rng(seed).integers(0, 20, (3, 11)).astype(np.uint16)
    keys = row_keys(seed, "", np.arange(3))
    replaced = TokenDropout(rate, replace_with=30, special_ids=[5, 6])
    loss_only = TokenDropout(rate, special_ids=[5, 6])
    got = replaced.apply({"tokens": tokens}, keys, 10)
    mask = loss_only.apply({"tokens": tokens}, keys, 10)["target_mask"]

    assert np.array_equal(got["targets"], tokens[:, 1:])
    for row, key in enumerate(keys.tolist()):
        dropped = [slow.happens(key, place, rate) for place in range(10)]
        for place, token in enumerate(tokens[row, :10].tolist()):
            expected = 30 if dropped[place] and token not in (5, 6) else token
            assert got["tokens"][row, place] == expected
            following = tokens[row, place + 1]
            assert mask[row, place] == (not dropped[place] or following in (5, 6))
        assert got["tokens"][row, 10] == tokens[row, 10]


def test_without_replacement_the_tokens_stay_and_no_targets_are_added():
    fields = {"tokens": np.arange(22, dtype=np.uint16).reshape(2, 11)}
    got = TokenDropout(0.5).apply(fields, row_keys(0, "", [0, 1]), 10)

    assert sorted(got) == ["target_mask", "tokens"]
    assert got["tokens"] is fields["tokens"]


def test_tokens_are_dropped_as_often_as_asked():
    tokens = np.ones((1_000, 1_001), np.uint16)
    got = TokenDropout(0.1, replace_with=0).apply(
        {"tokens": tokens}, row_keys(0, "", np.arange(1_000))
    )

    assert abs((got["tokens"] == 0).mean() - 0.1) < 3 * (0.09 / tokens.size) ** 0.5


def test_rows_without_a_next_token_have_no_target_at_the_last_place():
    tokens = np.arange(10, dtype=np.uint16).reshape(2, 5)
    got = TokenDropout(0.0, replace_with=99).apply({"tokens": tokens}, row_keys(0, "", [0, 1]))

    assert got["targets"][:, :4].tolist() == tokens[:, 1:].tolist()
    assert got["target_mask"].tolist() == [[True] * 4 + [False]] * 2
    loss_only = TokenDropout(0.0).apply({"tokens": tokens}, row_keys(0, "", [0, 1]))
    assert loss_only["target_mask"].tolist() == got["target_mask"].tolist()


def test_targets_that_were_left_out_stay_so():
    mask = np.array([[True, False, True, False]])
    fields = {"tokens": np.ones((1, 5), np.uint16), "target_mask": mask}
    got = TokenDropout(0.0).apply(fields, row_keys(0, "", [0]), 4)

    assert got["target_mask"].tolist() == mask.tolist()
    assert got["target_mask"] is not mask


def test_what_is_no_rate_or_no_transform_is_refused():
    with pytest.raises(PlanError, match="rate must be a probability from 0 to 1; got 'x'"):
        TokenDropout("x")
    with pytest.raises(PlanError, match=r"transform=1 has no apply\(\)"):
        Chain(TokenDropout(0.1), 1)


def test_targets_are_the_tokens_from_before_the_first_dropout():
    fields = {"tokens": np.arange(11, dtype=np.uint16)[None]}
    once = TokenDropout(0.5, replace_with=50).apply(fields, row_keys(0, "", [0]), 10)
    twice = TokenDropout(0.5, replace_with=60).apply(once, row_keys(0, "", [1]), 10)

    assert twice["targets"].tolist() == [list(range(1, 11))]
    assert {50, 60} < set(twice["tokens"][0].tolist())


def test_labels_of_masked_tokens_stay_and_their_loss_can_be_left_out():
    fields = {"tokens": np.arange(2, 66, dtype=np.uint16)[None]}
    masked = MaskTokens(1, 100, rate=0.5).apply(fields, row_keys(0, "", [0]), 63)
    dropped = TokenDropout(1.0, replace_with=0).apply(masked, row_keys(0, "", [0]), 63)
    ignored = TokenDropout(1.0, special_ids=[9]).apply(masked, row_keys(0, "", [0]), 63)

    assert "targets" not in dropped
    assert np.array_equal(dropped["labels"], fields["tokens"][:, :63])
    assert (dropped["tokens"][:, :63] == 0).all()
    kept = masked["target_mask"] & (masked["labels"] == 9)
    assert np.array_equal(ignored["target_mask"], kept)


def test_every_setting_is_described():
    settings = [{}, {"rate": 0.2}, {"replace_with": 0}, {"special_ids": [0]}]
    found = [TokenDropout(**{"rate": 0.1, **each}) for each in settings]

    assert len({repr(each.describe()) for each in found}) == len(found)
    assert repr(found[0]) == "TokenDropout(0.1 of the tokens, loss only)"
    assert repr(found[2]) == "TokenDropout(0.1 of the tokens, replaced with 0)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 2}, "rate must be a probability from 0 to 1; got 2."),
        ({"rate": 0.1, "replace_with": -1}, "replace_with must be a token id, 0 or more; got -1."),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        TokenDropout(**settings)
