"""Every token but the first is a target once, in every format; where one is not, that is counted.

Tokens are numbers that never come again, so a target is known by its id. What a format trains
on is worked out here as its models do: `labels` of `format="hf"` lose their first column.
"""

import itertools
import warnings
from collections import Counter

import numpy as np
import pytest
import torch

from penstock import Documents, Loader, Packs, Plan, Texts, Windows, build, stream
from penstock.errors import PlanError
from penstock.transforms import Chain, MaskTokens, Transformed

IGNORE_LEFT_OUT = pytest.mark.filterwarnings("ignore:format=.hf. leaves out")


@pytest.fixture
def numbered(write_store, tmp_path):
    """A store of documents of given sizes, part by part; its tokens count on from 1."""

    def numbered(*parts):
        counter = itertools.count(1)
        made = [[[next(counter) for _ in range(size)] for size in part] for part in parts]
        name = "-".join("_".join(map(str, part)) for part in parts)[:80]
        return write_store(tmp_path / name, made)

    return numbered


def trained(batches, unshifted="labels"):
    """How often each token is a target."""
    found = Counter()
    for batch in batches:
        targets = batch[unshifted][:, 1:] if unshifted in batch else batch["targets"]
        found.update(targets[targets != -100].tolist())
    return found


def epoch(rows, **options):
    return Loader(rows, 1, epochs=1, shuffle="none", **options)


@pytest.mark.parametrize(("format", "stride"), [("dict", 16), ("hf", 15)])
def test_5002_targets_in_both_formats(numbered, format, stride):
    store = numbered([5_003])
    loader = epoch(Windows(store, 16, stride=stride, tail="pad"), format=format)

    assert trained(loader) == Counter(range(2, 5_004))
    assert loader.unread_targets == 0


def test_without_the_overlap_the_loader_warns_and_counts(numbered):
    windows = Windows(numbered([5_003]), 16, tail="pad")
    with pytest.warns(UserWarning, match="leaves out 312 of 5,002 targets") as caught:
        loader = epoch(windows, format="hf")

    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "Windows(…, 16, stride=15)" in str(caught[0].message)
    assert sum(trained(loader).values()) == 4_690
    assert loader.unread_targets == 312
    assert windows.unread_targets == epoch(windows).unread_targets == 0


def check_counts(store, length, stride, tail, format):
    """The count of targets left out, against one by one; and how often each is a target."""
    if store.num_tokens <= (length if tail == "drop" else 1) or (tail == "pad" and stride > length):
        return 0
    windows = Windows(store, length, stride=stride, tail=tail)
    loader = epoch(windows, format=format)
    found = trained(loader)
    assert loader.unread_targets == store.num_tokens - 1 - len(found)
    per_row = length if format == "dict" else length - 1
    if stride == per_row:
        assert set(found.values()) <= {1}
    if stride <= per_row and tail == "pad":
        assert not loader.unread_targets
    return 1


def sampled(seed, count):
    random = np.random.default_rng(seed)
    for _ in range(count):
        length = int(random.integers(2, 13))
        format = str(random.choice(["dict", "hf"]))
        tail = str(random.choice(["drop", "pad"]))
        yield int(random.integers(2, 90)), length, int(random.integers(1, 16)), tail, format


@IGNORE_LEFT_OUT
def test_targets_left_out_are_counted_for_any_windows(numbered):
    stores = {}
    checked = 0
    for size, *settings in sampled(seed=1, count=150):
        if size not in stores:
            stores[size] = numbered([size // 2, size - size // 2])
        checked += check_counts(stores[size], *settings)

    assert checked > 100


@pytest.mark.torture
@IGNORE_LEFT_OUT
def test_targets_left_out_are_counted_for_all_small_windows(numbered):
    checked = 0
    for size in range(2, 42):
        store = numbered([size // 2], [size - size // 2])
        for length in range(2, 13):
            cuts = [None, *({0: each} for each in range(2, length) if length % each == 0)]
            kinds = itertools.product(range(1, length + 3), ("drop", "pad"), ("dict", "hf"), cuts)
            for stride, tail, format, cut in kinds:
                checked += check_counts(store, length, stride, tail, format, cut)
    print(f"figure: targets counted one by one for {checked:,} kinds of windows")  # noqa: T201


def test_the_apis_for_models_that_shift_overlap_by_default(numbered):
    huggingface = pytest.importorskip("penstock.integrations.huggingface")
    windows = Windows(numbered([200, 303]), 16, tail="pad")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps = huggingface.StepLoader(windows, 1)
        items = huggingface.RowItems(windows)

    assert trained(steps) == Counter(range(2, 504))
    assert trained({name: values[None] for name, values in item.items()} for item in items) == (
        Counter(range(2, 504))
    )
    shifted = huggingface.StepLoader(windows, 1, labels="shifted")
    assert len(shifted) == len(windows)
    given = Windows(numbered([200, 303]), 16, stride=16, tail="pad")
    loader = huggingface.StepLoader(given, 1)
    assert len(loader) == len(given)
    with pytest.warns(UserWarning, match="leaves out 31 of 502 targets"):
        next(iter(loader))


@pytest.mark.parametrize("labels", ["same", "shifted"])
@pytest.mark.parametrize("kind", ["streamed", "whole", "preprocessed", "module"])
def test_the_data_modules_of_lightning_train_on_every_token_once(tmp_path, labels, kind):
    pytest.importorskip("lightning", reason="needs penstock[lightning]")
    from penstock.integrations.lightning import LLMDataModule, LocalOpenWebTextDataModule

    letters = "".join(chr(0x20 + number) for number in range(90))  # a byte each, none twice
    path = tmp_path / "text.txt"
    path.write_text(letters[:50].strip() + "\n" + letters[50:] + "\n")
    options = {"labels": labels, "num_workers": 0, "cache_dir": tmp_path / "cache"}
    if kind == "module":
        made = LLMDataModule("bytes", 1, 8, data={"train": path}, streaming=True, **options)
    else:
        tokens = np.array([*letters[:50].strip().encode(), 256, *letters[50:].encode(), 256])
        np.save(tmp_path / "tokens.npy", tokens.astype(np.uint16))
        options |= {"use_preprocessed": kind == "preprocessed", "streaming": kind == "streamed"}
        names = ("train", "val") if kind == "preprocessed" else ()
        files = {f"preprocessed_{side}": tmp_path / "tokens.npy" for side in names}
        made = LocalOpenWebTextDataModule(
            path, path, max_length=8, batch_size=1, tokenizer="bytes", **files, **options
        )
    made.setup("fit")
    found = Counter()
    for batch in made.train_dataloader():
        targets = batch["labels"][:, 1:] if labels == "same" else batch["labels"]
        found.update(targets[targets != -100].tolist())
    made.teardown("fit")
    expected = Counter([*letters[:50].strip().encode(), 256, *letters[50:].encode(), 256])
    expected[ord("!")] -= 1  # the first token of all is what the others are predicted from

    assert found == +expected


def naive_mask(sizes, length, stride, rows):
    """The targets of each row, -100 where the token before is of another document."""
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    made = []
    for start in (row * stride for row in range(rows)):
        places = range(start + 1, start + length + 1)
        made.append(
            [
                place + 1 if place < len(owners) and owners[place] == owners[place - 1] else -100
                for place in places
            ]
        )
    return made


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize(("length", "stride"), [(6, None), (6, 5), (6, 2), (1, None), (30, None)])
def test_targets_across_borders_are_ignored_on_request(numbered, length, stride, tail):
    parts = ([4, 0, 1, 1, 9], [2], [7, 3, 0], [12, 1])
    sizes = [size for part in parts for size in part]
    windows = Windows(numbered(*parts), length, stride=stride, tail=tail, borders="mask")
    expected = naive_mask(sizes, length, windows.stride, len(windows))
    targets = [batch["targets"][0].tolist() for batch in epoch(windows)]
    alone = [targets for _, targets in Loader(windows, 1, epochs=1, shuffle="none", format="tuple")]

    assert targets == expected
    assert [each[0].tolist() for each in alone] == expected
    if windows.stride < length:
        labels = [batch["labels"][0, 1:].tolist() for batch in epoch(windows, format="hf")]
        assert labels == [row[:-1] for row in expected]


def test_masked_borders_are_other_rows_and_marked_ones_are_not(numbered):
    store = numbered([5, 5, 5])
    plain, marked, masked = (Windows(store, 4, borders=each) for each in (False, True, "mask"))

    assert plain.digest == marked.digest != masked.digest
    assert masked.describe() == {**plain.describe(), "borders": "mask"}
    assert list(epoch(masked)[0]) == ["inputs", "targets"]
    mixed = Plan({"masked": masked, "packed": Packs(store, 4)}, seed=1)
    for batch in Loader(mixed, 2, epochs=1):
        targets = batch["targets"][batch["targets"] != -100]
        assert not {6, 11} & set(targets.tolist())


def test_labels_of_masked_tokens_are_of_every_token_and_warn_of_nothing(numbered):
    windows = Windows(numbered([33]), 4)
    masking = MaskTokens(60, 64, rate=1, masked=1, random=0)
    for transform in (masking, Chain(masking)):
        loader = epoch(Transformed(windows, transform), format="hf")
        found = torch.cat([batch["labels"] for batch in loader]).flatten().tolist()

        assert found == list(range(1, 33))
        assert loader.unread_targets == 0


def test_rows_of_documents_lose_no_target_in_either_format(numbered):
    store = numbered([5, 1, 9], [20])
    expected = Counter(set(range(1, 36)) - {1, 6, 7, 16})
    for rows in (Packs(store, 8), Documents(store, 8, overflow="split")):
        for format in ("dict", "hf"):
            loader = epoch(rows, format=format)
            assert trained(loader) == expected
            assert loader.unread_targets == 0


def test_what_no_stride_keeps_is_refused(numbered):
    store = numbered([40])
    with pytest.raises(PlanError, match=r'Rows of 1 token have no target with format="hf"'):
        Loader(Windows(store, 1), 1, format="hf")


def test_a_store_that_grows_is_warned_of_by_its_share(tmp_path):
    streamed = stream(Texts(["some text " * 50]), tmp_path / "store", tokenizer="bytes")
    try:
        with pytest.warns(UserWarning, match="leaves out 1 of every 16 targets"):
            Loader(Windows(streamed, 16), 1, format="hf")
    finally:
        streamed.close()
    whole = build(Texts(["some text " * 50]), tmp_path / "whole", tokenizer="bytes")
    with pytest.warns(UserWarning, match="leaves out 31 of 500 targets"):
        Loader(Windows(whole, 16), 1, format="hf")
