import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from penstock.errors import PlanError
from penstock.transforms import MaskTokens, begins_word, collate_masked, row_keys
from penstock.transforms.mask import IGNORED

VOCAB = 60
MASK = 59
SPECIAL = (0, 1)
# Every third id goes on with the word before it.
BEGINS = np.arange(VOCAB) % 3 != 2


def slow_masked(slow, tokens, key, masking, *, begins=None):
    """One row, token by token: the inputs and the labels."""
    select, kind, random = (slow.subkey(key, number) for number in range(3))
    inputs, labels, start = list(tokens), [IGNORED] * len(tokens), 0
    for place, token in enumerate(tokens):
        after_special = place > 0 and tokens[place - 1] in SPECIAL
        if begins is None or begins[token] or token in SPECIAL or after_special:
            start = place
        if token in SPECIAL or not slow.happens(select, start, masking.rate):
            continue
        labels[place] = token
        share = (slow.draw(kind, place) >> 11) / 2**53
        if share < masking.masked:
            inputs[place] = masking.mask_id
        elif share < masking.masked + masking.random:
            inputs[place] = slow.below(random, place, masking.vocab_size)
    return inputs, labels


@given(
    st.integers(0, 2**30),
    st.sampled_from([0.0, 0.15, 0.6, 1.0]),
    st.sampled_from([(0.8, 0.1), (0.5, 0.5), (0.0, 0.0), (0.0, 1.0)]),
    st.booleans(),
)
def test_masking_equals_a_loop_over_tokens(slow, seed, rate, shares, whole_words):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (4, 21)).astype(np.uint16)
    keys = row_keys(seed, "rows", np.arange(4))
    begins = BEGINS if whole_words else None
    masking = MaskTokens(
        MASK, VOCAB, special_ids=SPECIAL, rate=rate, masked=shares[0], random=shares[1],
        begins_word=begins,
    )  # fmt: skip
    got = collate_masked(masking.apply({"tokens": tokens}, keys))

    for row, key in enumerate(keys.tolist()):
        inputs, labels = slow_masked(slow, tokens[row].tolist(), key, masking, begins=begins)
        assert got["input_ids"][row].tolist() == inputs
        assert got["labels"][row].tolist() == labels


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.booleans())
def test_rows_are_masked_alike_however_they_are_split_into_calls(sizes, whole_words):
    """World size, batch size and threads decide which rows meet in a call, and nothing else."""
    total = sum(sizes)
    tokens = np.random.default_rng(total).integers(0, VOCAB, (total, 17)).astype(np.uint16)
    keys = row_keys(5, "rows", np.arange(total))
    masking = MaskTokens(
        MASK, VOCAB, special_ids=SPECIAL, rate=0.4, begins_word=BEGINS if whole_words else None
    )
    whole = masking.apply({"tokens": tokens}, keys, 16)
    cuts = np.cumsum(sizes)[:-1]

    dealt = np.random.default_rng(0).permutation(total)
    for rows in np.split(dealt, cuts):
        part = masking.apply({"tokens": tokens[rows]}, keys[rows], 16)
        assert all(np.array_equal(part[name], whole[name][rows]) for name in whole)


@pytest.fixture(scope="module")
def million():
    """2^20 tokens of which one in 16 is special, masked in two epochs."""
    vocab_size = 30_522
    tokens = np.random.default_rng(1).integers(1_000, vocab_size, (2_048, 512)).astype(np.uint16)
    tokens[:, ::16] = 102
    masking = MaskTokens(103, vocab_size, special_ids=[0, 101, 102])
    epochs = [
        masking.apply({"tokens": tokens}, row_keys(17, "m", np.full(2_048, e), np.arange(2_048)))
        for e in (0, 1)
    ]
    return tokens, epochs


def rates(tokens, changed, eligible, mask_id):
    """How often tokens are chosen, and chosen ones masked, replaced and kept; and how many."""
    chosen = changed["target_mask"]
    inputs = changed["tokens"]
    masked = chosen & (inputs == mask_id)
    kept = chosen & (inputs == tokens)
    counts = {"masked": masked.sum(), "kept": kept.sum()}
    counts["random"] = chosen.sum() - counts["masked"] - counts["kept"]
    return {
        "chosen": (chosen.sum() / eligible, 0.15, eligible),
        **{
            name: (counts[name] / chosen.sum(), share, chosen.sum())
            for name, share in (("masked", 0.8), ("random", 0.1), ("kept", 0.1))
        },
    }


def test_over_a_million_tokens_the_rates_are_those_of_bert(million, figure):
    tokens, (changed, _) = million
    eligible = int((tokens != 102).sum())

    found = []
    for name, (got, expected, number) in rates(tokens, changed, eligible, 103).items():
        sigma = (expected * (1 - expected) / number) ** 0.5
        found.append(f"{name} {got:.4f} ({(got - expected) / sigma:+.2f} sigma)")
        assert abs(got - expected) < 3 * sigma, found
    figure(f"masking, {tokens.size:,} tokens: {', '.join(found)}")


def test_special_tokens_are_never_chosen_and_the_others_stay_where_not_chosen(million):
    tokens, (changed, _) = million

    assert not changed["target_mask"][tokens == 102].any()
    same = ~changed["target_mask"]
    assert np.array_equal(changed["tokens"][same], tokens[same])
    assert np.array_equal(changed["labels"], tokens)


def test_random_tokens_come_evenly_from_the_whole_vocabulary(million):
    tokens, epochs = million
    drawn = np.concatenate(
        [
            each["tokens"][
                each["target_mask"] & (each["tokens"] != tokens) & (each["tokens"] != 103)
            ]
            for each in epochs
        ]
    )
    counts = np.histogram(drawn, bins=30, range=(0, 30_522))[0]
    expected = len(drawn) / 30

    assert ((counts - expected) ** 2 / expected).sum() < 58.3  # 29 degrees, p = 0.001
    assert drawn.min() < 100  # below any token of the rows


def test_epochs_differ_as_two_independent_draws_do(million):
    tokens, (first, second) = million
    both = (first["target_mask"] & second["target_mask"]).sum() / (tokens != 102).sum()

    assert abs(both - 0.15**2) < 3 * (0.15**2 / tokens.size) ** 0.5


def test_a_word_is_chosen_whole_or_not_at_all():
    tokens = np.random.default_rng(2).integers(2, VOCAB, (200, 64)).astype(np.uint16)
    masking = MaskTokens(MASK, VOCAB, rate=0.3, begins_word=BEGINS)
    chosen = masking.apply({"tokens": tokens}, row_keys(0, "w", np.arange(200)))["target_mask"]
    goes_on = ~BEGINS[tokens[:, 1:]]
    starts = BEGINS[tokens] | (np.arange(64) == 0)

    assert (chosen[:, 1:] == chosen[:, :-1])[goes_on].all()
    assert abs(chosen[starts].mean() - 0.3) < 3 * (0.21 / starts.sum()) ** 0.5


def test_padding_of_short_rows_is_never_chosen():
    fields = {"tokens": np.full((3, 9), 7, np.uint16), "num_targets": np.array([8, 3, 0])}
    changed = MaskTokens(MASK, VOCAB, rate=1).apply(fields, row_keys(0, "p", np.arange(3)), 8)

    assert changed["target_mask"].sum(axis=1).tolist() == [8, 4, 1]
    assert "num_targets" not in changed


def test_what_was_given_stays_as_it_was_and_the_token_after_the_inputs_too():
    tokens = np.arange(18, dtype=np.uint16).reshape(2, 9)
    before = tokens.copy()
    changed = MaskTokens(MASK, VOCAB, rate=1).apply({"tokens": tokens}, row_keys(0, "", [1, 2]), 8)

    assert np.array_equal(tokens, before)
    assert changed["tokens"][:, 8].tolist() == [8, 17]
    assert changed["labels"].shape == (2, 8)
    assert changed["tokens"].dtype == changed["labels"].dtype == np.uint16


def test_ids_that_the_type_cannot_hold_make_it_wider():
    tokens = np.zeros((1, 50), np.uint16)
    changed = MaskTokens(70_000, 70_001, rate=1, masked=1, random=0).apply(
        {"tokens": tokens}, row_keys(0, "", [1])
    )

    assert changed["tokens"].dtype == np.uint32
    assert set(changed["tokens"].reshape(-1).tolist()) == {70_000}


def test_no_rows_are_no_trouble():
    masking = MaskTokens(MASK, VOCAB, begins_word=BEGINS)
    changed = masking.apply({"tokens": np.zeros((0, 9), np.uint16)}, np.zeros(0, np.uint64), 8)

    assert changed["labels"].shape == (0, 8)


def test_every_setting_is_described():
    settings = [
        {}, {"rate": 0.2}, {"masked": 0.7}, {"random": 0.2}, {"special_ids": [3]},
        {"begins_word": BEGINS}, {"begins_word": ~BEGINS},
    ]  # fmt: skip
    found = [MaskTokens(MASK, VOCAB, **each).describe() for each in settings]
    found += [MaskTokens(58, VOCAB).describe(), MaskTokens(MASK, 61).describe()]

    assert len({repr(each) for each in found}) == len(found)
    assert "whole words" in repr(MaskTokens(MASK, VOCAB, begins_word=BEGINS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_id": 60}, "mask_id must be from 0 to vocab_size - 1 = 59; got 60."),
        ({"rate": 1.5}, "rate must be a probability from 0 to 1; got 1.5."),
        ({"masked": 0.95}, "their sum at most 1; got masked=0.95 and random=0.1."),
        ({"special_ids": [60]}, "special_ids must be from 0 to vocab_size - 1 = 59; got 60."),
        ({"begins_word": BEGINS[:5]}, "for each of the 60 ids; its shape is (5,)."),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        MaskTokens(**{"mask_id": MASK, "vocab_size": VOCAB, **settings})


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(PlanError, match="hold ids from 5 to 60, but vocab_size is 60"):
        MaskTokens(MASK, VOCAB).apply({"tokens": np.array([[5, 60]])}, row_keys(0, "", [0]))


def test_words_of_gpt2_begin_at_blanks_and_punctuation(gpt2):
    begins = begins_word(gpt2.definition.config["model"]["vocab"], "Ġ", vocab_size=50_257)
    text = "Unbelievable naïve stories, isn't it?\nYes"
    ids = gpt2.encode(text).tolist()
    words = []
    for number in ids:
        piece = gpt2.decode_bytes([number])
        if begins[number] or not words:
            words.append(piece)
        else:
            words[-1] += piece

    assert b"".join(words) == text.encode()
    expected = ["Unbelievable", " naïve", " stories", ",", " isn", "'t", " it", "?", "\nYes"]
    assert [word.decode() for word in words] == expected


def test_words_of_other_vocabularies_begin_where_their_mark_says():
    pieces = {"▁a": 0, "b": 1, "<0xE2>": 2, "!": 3, "": 4}

    assert begins_word(pieces, "▁").tolist() == [True, False, False, True, True]
    assert begins_word({"a": 0, "##b": 1}, "##", vocab_size=4).tolist() == [True, False, True, True]
    with pytest.raises(PlanError, match='mark must be "##", "Ġ" or "▁"; got \'@\''):
        begins_word(pieces, "@")
    with pytest.raises(PlanError, match="vocab_size=3 is too small: the vocabulary has an id 4"):
        begins_word(pieces, "▁", vocab_size=3)


def test_hugging_faces_collator_has_the_same_rates(figure):
    """A million tokens through both; each within 3 sigma of the other."""
    transformers = pytest.importorskip(
        "transformers", reason="compares with transformers, which is not installed"
    )
    torch = pytest.importorskip("torch", reason="transformers' collator needs torch")
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *(f"w{n}" for n in range(995))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")),
        **{f"{name[1:-1].lower()}_token": name for name in names[:5]},
    )
    assert len(tokenizer) == 1_000
    tokens = np.random.default_rng(3).integers(5, 1_000, (2_048, 512))
    tokens[:, 0], tokens[:, -1] = 1, 2
    torch.manual_seed(0)
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    theirs = collator([{"input_ids": row} for row in tokens.tolist()])
    masking = MaskTokens(3, 1_000, special_ids=tokenizer.all_special_ids)
    ours = masking.apply({"tokens": tokens}, row_keys(0, "hf", np.arange(2_048)))
    labels = theirs["labels"].numpy()
    mine = collate_masked(ours)
    assert set(labels[labels != tokens]) == {IGNORED}
    assert set(mine["labels"][mine["labels"] != tokens]) == {IGNORED}

    eligible = 2_048 * 510
    found = []
    their_fields = {"tokens": theirs["input_ids"].numpy(), "target_mask": labels != IGNORED}
    both = (rates(tokens, each, eligible, 3) for each in (ours, their_fields))
    for (name, (got, expected, number)), (_, (other, _, others)) in zip(
        *(each.items() for each in both), strict=True
    ):
        sigma = (expected * (1 - expected) * (1 / number + 1 / others)) ** 0.5
        found.append(f"{name} {got:.4f} against {other:.4f} ({(got - other) / sigma:+.2f} sigma)")
        assert abs(got - other) < 3 * sigma, found
    figure(f"masking against transformers {transformers.__version__}: {', '.join(found)}")
