"""Both datasets against the formulas of hand-written ones, written here once more."""

import copy
import json
import mmap
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, default_collate

from penstock import Texts, build
from penstock.errors import PlanError, SourceError, TokenizerError
from penstock.integrations.pytorch import TextDataset, TransformerDataset, create_dataloaders
from penstock.integrations.pytorch.samples import read_samples
from penstock.sources.slices import cut


def naive_samples(path, is_jsonl):
    with open(path, encoding="utf-8") as stream:  # noqa: PTH123
        if is_jsonl:
            return [json.loads(line)["text"] for line in stream]
        return [part.strip() for part in stream.read().split("\n\n") if part.strip()]


def naive_items(ids, length):
    """Item i is the ids from i on, and the ids one further."""
    items = [(ids[i : i + length], ids[i + 1 : i + length + 1]) for i in range(len(ids))]
    return [item for item in items if len(item[1]) == length]


def check(path, is_jsonl, tokenizer, length):
    samples = naive_samples(path, is_jsonl)
    ids = [token for sample in samples for token in tokenizer.encode(sample)]
    dataset = TransformerDataset(path, tokenizer, seq_length=length, is_jsonl=is_jsonl)
    items = [(item["input_ids"].tolist(), item["labels"].tolist()) for item in dataset]

    assert items == naive_items(ids, length)
    assert len(dataset) == dataset.num_sequences == max(0, len(ids) - length)
    assert dataset.samples == samples
    assert dataset.tokenized_data.tolist() == ids


JSONL = {
    "three": ["First text.", "Second, longer text.", "Third."],
    "with empties": ["", "a b c d e f", " ", "\n", "g"],
    "unicode": ["naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦", "\u2028\u0085 x"],
    "crlf": '{"text": "one two three"}\r\n{"text": "four five six"}\r\n',
    "no newline at the end": '{"text": "one two three"}\n{"text": "four five six"}',
    "other fields": '{"id": 1, "text": "one two three", "x": NaN}\n',
    "a field twice": '{"text": "first", "text": "second one"}\n',
    "empty": "",
}
TEXT = {
    "paragraphs": "First paragraph.\n\nSecond paragraph,\nof two lines.\n\nThird.",
    "triple": "one two\n\n\nthree four\n\n\n\nfive six\n\n\n\n\nseven",
    "crlf": "one two\r\n\r\nthree four\r\n\r\n\r\nfive",
    "carriage returns": "one two\r\rthree\r\n\rfour\n\r\nfive",
    "trailing newline": "one two\n\nthree four\n",
    "trailing blank lines": "one two\n\nthree four\n\n\n",
    "leading blank lines": "\n\n\none two",
    "blank line with spaces": "one two\n \nthree\n\t\n\n \n\nfour five",
    "other white space": "\u3000one\u00a0two\x1c\n\n\x85three\u2028\n\n\u2003",
    "byte order mark": "\ufeffone two\n\nthree",
    "only white space": "\n\n \n\n\t\n",
    "one newline": "\n",
    "empty": "",
}


@pytest.mark.parametrize("length", [1, 4, 1000])
@pytest.mark.parametrize("name", JSONL)
def test_json_lines_are_as_the_formula_says(name, length, write, letters):
    check(write("a.jsonl", JSONL[name]), True, letters, length)


@pytest.mark.parametrize("length", [1, 4, 1000])
@pytest.mark.parametrize("name", TEXT)
def test_text_is_as_the_formula_says(name, length, write, letters):
    check(write("a.txt", TEXT[name]), False, letters, length)


@pytest.mark.parametrize("kind", ["paragraphs", "jsonl"])
def test_gpt2_is_as_the_formula_says(kind, write, gpt2):
    if kind == "jsonl":
        check(write("a.jsonl", JSONL["unicode"]), True, gpt2, 5)
    else:
        check(write("a.txt", TEXT["triple"]), False, gpt2, 5)


@given(
    pieces=st.lists(
        st.sampled_from(["\n", "\r", "\r\n", " ", "\t", "a", "é", "\u2028", "日", "\x1c"])
    )
)
def test_any_text_has_the_paragraphs_of_the_formula(pieces, scratch):
    path = scratch / "any.txt"
    path.write_bytes("".join(pieces).encode())

    found = list(read_samples(path, "paragraphs"))
    assert found == naive_samples(path, is_jsonl=False)


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_any_json_lines_have_their_texts(texts, scratch):
    path = scratch / "any.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))

    assert list(read_samples(path, "jsonl")) == texts


@pytest.mark.parametrize(
    ("num_tokens", "num_items"), [(0, 0), (1, 0), (7, 0), (8, 0), (9, 1), (10, 2)]
)
def test_text_shorter_than_the_window_and_exactly_the_window(num_tokens, num_items, write, letters):
    dataset = TransformerDataset(write("a.txt", "x" * num_tokens), letters, 8, is_jsonl=False)

    assert len(dataset) == num_items
    assert len(list(dataset)) == num_items


@pytest.mark.parametrize("stride", [1, 2, 3, 8, 11])
def test_windows_begin_a_stride_apart(stride, write, letters):
    dataset = TransformerDataset(write("a.jsonl", ["abcdefghijkl" * 4]), letters, 8, stride=stride)
    ids = [ord(letter) for letter in "abcdefghijkl" * 4]

    assert [item["input_ids"].tolist() for item in dataset] == [
        ids[i : i + 8] for i in range(0, len(ids) - 8, stride)
    ]


@pytest.mark.parametrize("stride", [1, 5])
def test_windows_run_across_the_parts_of_a_store(stride, write, letters, monkeypatch):
    """As in the store of a text of more than 64 MB."""
    path = write("a.jsonl", [chr(97 + number % 26) * 3 for number in range(20)])
    whole = TransformerDataset(path, letters, 8, stride=stride)
    monkeypatch.setitem(cut.__kwdefaults__, "slice_bytes", 7)
    parts = TransformerDataset(path, letters, 8, stride=stride)

    assert len(parts._store.manifest.parts) > 3
    assert parts.tokenized_data.tolist() == whole.tokenized_data.tolist()
    assert len(parts) == len(whole)
    numbers = list(range(len(whole)))
    assert torch.equal(
        default_collate(parts.__getitems__(numbers))["labels"],
        default_collate(whole.__getitems__(numbers))["labels"],
    )


def test_it_is_a_dataset_of_long_tensors_that_may_be_written_to(write, letters):
    dataset = TransformerDataset(write("a.jsonl", ["abcdefghij"]), letters, 4)
    item = dataset[0]

    assert isinstance(dataset, Dataset)
    assert list(item) == ["input_ids", "labels"]
    assert {value.dtype for value in item.values()} == {torch.long}
    item["labels"][:] = -100
    assert item["input_ids"].tolist() == [97, 98, 99, 100]
    assert dataset[0]["labels"].tolist() == [98, 99, 100, 101]


def test_indices_count_from_the_end_and_end(write, letters):
    dataset = TransformerDataset(write("a.jsonl", ["abcdefghij"]), letters, 4)

    assert torch.equal(dataset[-1]["labels"], dataset[5]["labels"])
    assert torch.equal(dataset[np.int64(-6)]["labels"], dataset[torch.tensor(0)]["labels"])
    for number in (6, -7, 10**20):
        with pytest.raises(IndexError):
            dataset[number]
        with pytest.raises((IndexError, OverflowError)):
            dataset.__getitems__([0, number])
    with pytest.raises(TypeError):
        dataset[1.0]
    with pytest.raises(IndexError, match="window 0 does not exist; there are 0 windows"):
        TransformerDataset(write("b.jsonl", ""), letters, 4)[0]


def test_many_items_at_once_are_the_items(write, letters):
    dataset = TransformerDataset(write("a.jsonl", ["abcdefghij"]), letters, 4)
    numbers = [3, 0, -1, 3]
    items = dataset.__getitems__(numbers)

    assert len(items) == 4
    for number, item in zip(numbers, items, strict=True):
        assert torch.equal(item["input_ids"], dataset[number]["input_ids"])
    assert [len(part) for part in (items[1:3], items[:0])] == [2, 0]
    assert torch.equal(items[-1]["labels"], dataset[3]["labels"])
    with pytest.raises(IndexError, match="item 4 does not exist; there are 4 items"):
        items[4]


def test_a_plain_dataloader_takes_both_datasets(write, letters):
    path = write("a.txt", "abcdefghij")
    named = next(iter(DataLoader(TransformerDataset(path, letters, 4, False), batch_size=3)))
    inputs, labels = next(iter(DataLoader(TextDataset(path, 4, letters), batch_size=3)))

    assert named["input_ids"].tolist() == inputs.tolist()
    assert named["labels"].tolist() == labels.tolist()
    assert inputs.shape == (3, 4)


def test_a_collate_function_of_ones_own_gets_a_list_of_items(write, letters):
    dataset = TransformerDataset(write("a.jsonl", ["abcdefghij"]), letters, 4)
    loader = DataLoader(dataset, batch_size=2, collate_fn=lambda items: [*items])

    assert [list(item) for item in next(iter(loader))] == [["input_ids", "labels"]] * 2


def test_labels_may_be_those_of_models_that_shift(write, letters):
    dataset = TransformerDataset(write("a.jsonl", ["abcdefghij"]), letters, 4, labels="same")
    item = dataset[2]
    item["labels"][0] = -100

    assert item["input_ids"].tolist() == [99, 100, 101, 102]
    assert item["labels"].tolist() == [-100, 100, 101, 102]
    with pytest.raises(PlanError, match='labels=\'hf\' is not "shifted" or "same"'):
        TransformerDataset(write("a.jsonl", ["abc"]), letters, 4, labels="hf")


def test_an_end_token_only_where_it_is_asked_for(write, gpt2, letters):
    path = write("a.jsonl", ["one", "", "two"])

    assert TransformerDataset(path, "gpt2").tokenized_data.tolist() == [505, 11545]
    told = TransformerDataset(path, "gpt2", eos=True).tokenized_data.tolist()
    assert told == [505, 50256, 11545, 50256]
    assert TransformerDataset(path, gpt2, eos="<|endoftext|>").tokenized_data.tolist() == told
    assert TransformerDataset(path, letters, eos=0).tokenized_data[3] == 0
    with pytest.raises(TokenizerError, match="Letters does not say which of its tokens ends"):
        TransformerDataset(path, letters, eos=True)
    with pytest.raises(TokenizerError, match="Letters gives no id for '</s>'"):
        TransformerDataset(path, letters, eos="</s>")


def test_attributes_stay(write, letters):
    dataset = TransformerDataset(write("a.jsonl", ["abc", "def"]), letters, 4, True)

    assert dataset.tokenizer is letters
    assert (dataset.seq_length, dataset.is_jsonl, dataset.num_sequences) == (4, True, 2)
    assert dataset.samples == ["abc", "def"]
    assert not dataset.tokenized_data.flags.writeable
    assert TransformerDataset(write("a.jsonl", ["a"]), "gpt2").tokenizer.decode([505]) == "one"


def test_samples_are_read_when_asked_for_and_only_from_the_same_file(write, letters):
    path = write("a.jsonl", ["abc", "def"])
    dataset = TransformerDataset(path, letters, 4)
    assert "samples" not in vars(dataset)

    write("a.jsonl", ["abc", "deF"])

    with pytest.raises(SourceError, match="has changed since this dataset was made"):
        _ = dataset.samples


def test_ids_are_kept_narrow_in_a_file(write):
    dataset = TransformerDataset(write("a.jsonl", ["one two three"]), "gpt2")
    array = dataset.tokenized_data
    while isinstance(array.base, np.ndarray):
        array = array.base

    assert dataset.tokenized_data.dtype == np.uint16
    assert isinstance(array.base.obj, mmap.mmap)


@pytest.mark.parametrize("tokenizer", ["gpt2", "letters"])
def test_a_copy_and_a_pickle_read_the_same(tokenizer, write, letters):
    given = letters if tokenizer == "letters" else tokenizer
    if tokenizer == "letters":
        letters.unpicklable = lambda: None
    dataset = TransformerDataset(write("a.jsonl", ["abcdefghij klm nop"]), given, 4)
    _ = dataset.samples, dataset.tokenizer
    for other in (pickle.loads(pickle.dumps(dataset)), copy.copy(dataset)):
        assert torch.equal(other[1]["labels"], dataset[1]["labels"])
        assert other.samples == dataset.samples
        with pytest.raises(AttributeError, match="tokenizers are not pickled"):
            _ = other.tokenizer


def test_a_pickle_is_small(write):
    dataset = TextDataset(write("a.txt", "one two three " * 10_000), 8)
    _ = dataset.tokens

    assert len(pickle.dumps(dataset)) < 4_000


BAD = {
    "not JSON": ("{'text': 1}", "a.jsonl, line 1 is not JSON: Expecting property name"),
    "no text": ('{"text": "x"}\n\n{"id": 1}', 'line 3 has no field "text"; its fields: "id"'),
    "a list": ("[1]", "line 1 begins an array.*penstock.build makes a store of .*JSON arrays"),
    "lines of a list": ('[\n {"text": "x"}\n]', "line 1 begins an array.*penstock.build"),
    "a number": ('{"text": 5}', '"text" holds 5, not a string'),
    "not UTF-8": (b'{"text": "\xff"}', r"is not UTF-8 at byte 10 \(invalid start byte\)"),
    "cut off": ('{"text": "é'.encode()[:-1], "is not UTF-8 at byte 10"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named(name, write, letters):
    contents, message = BAD[name]
    with pytest.raises(SourceError, match=message):
        TransformerDataset(write("a.jsonl", contents), letters)


@pytest.mark.parametrize("tokenizer", ["gpt2", "letters"])
def test_a_file_that_is_not_there_is_named(tokenizer, tmp_path, letters):
    given = letters if tokenizer == "letters" else tokenizer
    with pytest.raises(SourceError, match=r"nope\.txt does not exist \(working directory"):
        TextDataset(tmp_path / "nope.txt", 8, given)
    with pytest.raises(SourceError, match="is a directory; give one file"):
        TextDataset(tmp_path, 8, given)


def test_a_store_is_not_taken_for_a_file_of_text(tmp_path):
    build(Texts(["one", "two"]), tmp_path / "store", tokenizer="bytes")
    for read in (TextDataset, lambda path: create_dataloaders(path, path, "gpt2")):
        with pytest.raises(SourceError, match=r"is a store.*penstock.Loader and penstock.Windows"):
            read(tmp_path / "store")


@pytest.mark.parametrize("name", ["a.csv", "a.txt.gz", "a.log"])
def test_a_file_of_another_format_is_sent_to_penstock_build(name, write):
    path = write(name, "id,text\n1,one two three\n" * 9)
    with pytest.raises(SourceError, match=r"contains one of these, set.*penstock.build makes a st"):
        create_dataloaders(path, path, "gpt2")


def test_records_that_are_read_as_paragraphs_are_warned_of(write):
    path = write("a.csv", "id,text\n1,one two three\n" * 9)
    with pytest.warns(UserWarning, match="as plain text, with the syntax of .csv"):
        create_dataloaders(path, path, "gpt2", 1, 4, is_jsonl=False)


def test_a_slice_is_a_batch(write):
    text, lines = TextDataset(write("a.txt", "ab " * 9), 4), write("a.jsonl", ["abc de fg"])
    records = TransformerDataset(lines, "bytes", 4)

    assert torch.equal(text[1:7:2][1], torch.stack([text[n][1] for n in (1, 3, 5)]))
    assert torch.equal(records[-2:]["labels"][1], records[-1]["labels"])
    assert text[3:3][0].shape == (0, 4)


def test_a_blank_line_between_json_lines_is_no_sample(write, letters):
    dataset = TransformerDataset(
        write("a.jsonl", '{"text": "ab"}\n\n \n{"text": "c"}\n\n'), letters
    )

    assert dataset.samples == ["ab", "c"]


def test_half_a_surrogate_pair_has_no_ids(write):
    with pytest.raises(SourceError, match="holds half of a surrogate pair"):
        TransformerDataset(write("a.jsonl", '{"text": "ab\\ud800cd"}'), "gpt2")


def test_windows_need_a_length_and_a_stride(write, letters):
    for arguments in ({"seq_length": 0}, {"stride": 0}):
        with pytest.raises(PlanError, match="must be at least 1"):
            TransformerDataset(write("a.jsonl", ["abc"]), letters, **arguments)


@pytest.mark.parametrize(
    "text",
    ["one two three four\n\nfive\n", "one\r\ntwo\r\n", "", "x", "  leading\n\n\n", "\ufeffmark"],
)
@pytest.mark.parametrize("length", [1, 3, 256])
def test_a_text_dataset_is_as_its_document_says(text, length, write, gpt2):
    path = write("a.txt", text)
    with open(path, encoding="utf-8") as stream:  # noqa: PTH123
        tokens = torch.tensor(gpt2.encode(stream.read()).astype(int), dtype=torch.long)
    dataset = TextDataset(path, length)

    assert torch.equal(dataset.tokens, tokens)
    assert dataset.tokens.dtype == torch.long
    assert len(dataset) == max(0, len(tokens) - length)
    for number, (x, y) in enumerate(dataset):
        assert torch.equal(x, tokens[number : number + length])
        assert torch.equal(y, tokens[number + 1 : number + length + 1])


def test_tokens_are_made_on_first_use(write):
    dataset = TextDataset(write("a.txt", "one two"), 1)

    assert "tokens" not in vars(dataset)
    assert dataset.tokens is dataset.tokens
    assert dataset.vocab_size == 50_257


def test_tiny_shakespeare_has_the_tokens_that_it_has(data, write):
    text = (data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    cut = int(0.9 * len(text))
    train = TextDataset(write("train.txt", text[:cut]))
    val = TextDataset(write("val.txt", text[cut:]), 64)

    assert (len(train.tokenized_data), len(val.tokenized_data)) == (301_966, 36_059)
    assert (len(train), len(val)) == (301_966 - 256, 36_059 - 64)


def _total(dataset, answer):
    answer.put(int(sum(item["labels"].sum() for item in dataset)))


@pytest.mark.parametrize(
    "method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.torture)]
)
def test_another_process_reads_a_temporary_store_and_does_not_remove_it(method, write, letters):
    context = multiprocessing.get_context(method)
    dataset = TransformerDataset(write("a.jsonl", ["abcdefghij"]), letters, 4)
    answer = context.Queue()
    process = context.Process(target=_total, args=(dataset, answer))
    process.start()
    told = answer.get(timeout=120)
    process.join(60)

    assert told == sum(int(item["labels"].sum()) for item in dataset)
    assert dataset._store.path.exists()


def test_a_temporary_store_goes_with_its_dataset(write, letters):
    dataset = TransformerDataset(write("a.jsonl", ["abcdefghij"]), letters, 4)
    view, path = dataset.tokenized_data, dataset._store.path
    del dataset

    assert not path.exists()
    assert not path.parent.exists()
    assert view.tolist() == [ord(letter) for letter in "abcdefghij"]


def test_a_failed_start_leaves_nothing_behind(write, letters, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(SourceError):
        TransformerDataset(write("a.jsonl", "no JSON"), letters)

    assert not list((tmp_path / "temporary").iterdir())
