"""Conversations become a store with loss masks."""

import gzip
import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.chat.chat import Chat
from penstock.errors import SourceError, StoreError
from penstock.store.manifest import part_file, read_manifest
from penstock.store.summary import summarize

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def record(number):
    return {
        "messages": [
            {"role": "user", "content": f"What is {number} + 1? 你好"},
            {"role": "assistant", "content": f"It is {number + 1}."},
        ]
    }


@pytest.fixture
def chats(tmp_path):
    """300 conversations, and five lines that are none or have nothing to train on."""
    bad = [
        '{"messages": [',
        '{"text": "no conversation"}',
        '{"messages": [{"role": "user", "content": "alone"}]}',
        '{"messages": [{"role": "user", "content": "a"}, '
        '{"role": "assistant", "content": "b", "train": false}]}',
        '{"messages": [{"role": "user", "content": NaN}]}',
    ]
    lines = [json.dumps(record(number), ensure_ascii=False) for number in range(300)]
    lines[100:100] = bad
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([*lines, "", ""]), encoding="utf-8")
    return path


@pytest.fixture
def build(gpt2_chat):
    """`penstock.build` with a tokenizer that is loaded already."""
    return partial(penstock.build, tokenizer=gpt2_chat, max_bad=10)


def documents(store):
    """Tokens and loss of each document."""
    found = []
    for part in range(len(store.manifest.parts)):
        tokens, loss = store.part_array(part, "tokens"), store.part_array(part, "loss")
        edges = [0, *store.part_array(part, "bounds").tolist()]
        found += [(tokens[a:b], loss[a:b]) for a, b in pairwise(edges)]
    return found


def test_a_chat_store_holds_what_render_gives(chats, tmp_path, build, gpt2_chat):
    store = build(chats, tmp_path / "store", chat="chatml")
    chat = Chat("chatml", gpt2_chat)

    assert len(store) == 300
    for number, (tokens, loss) in enumerate(documents(store)):
        expected = chat.render(record(number))
        assert np.array_equal(tokens, expected.tokens)
        assert np.array_equal(loss, expected.loss)
    assert penstock.verify(tmp_path / "store").digest == store.digest


def test_records_that_are_refused_are_counted_by_reason(chats, tmp_path, build):
    store = build(chats, tmp_path / "store", chat="chatml")
    (done,) = store.manifest.contents["builds"]

    assert done["rejects"]["reasons"] == {"bad_json": 2, "bad_shape": 1, "nothing_to_train": 2}
    assert done["counts"]["documents"] == 300
    assert done["counts"]["rejected"] == 5
    lines = (tmp_path / "store" / "rejects.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    data = chats.read_bytes()
    for each in log:
        line = data[each["offset"] : each["offset"] + each["num_bytes"]]
        assert b"\n" not in line
        assert data[each["offset"] - 1 : each["offset"]] == b"\n"
    assert log[2]["detail"] == "No token is trained on: 1 messages, 0 of the assistant."
    with pytest.raises(SourceError, match="more than the 3 that max_bad=3"):
        build(chats, tmp_path / "strict", chat="chatml", max_bad=3)


def test_the_bytes_do_not_depend_on_threads(chats, tmp_path, sums, small_slices, build):
    stores = [
        build(chats, tmp_path / f"store-{threads}", chat="chatml", workers=threads)
        for threads in (1, 4)
    ]

    assert len(stores[0].manifest.parts) > 3
    one, two = (sums(store.path) for store in stores)
    assert {name: each for name, each in one.items() if not name.startswith(".")} == {
        name: each for name, each in two.items() if not name.startswith(".")
    }


def test_a_build_that_was_killed_goes_on(chats, tmp_path, small_slices, monkeypatch, build):
    whole = build(chats, tmp_path / "whole", chat="chatml")
    seen = []

    def stop(progress):
        seen.append(progress)
        if progress.num_documents > 100:
            raise KeyboardInterrupt

    original = Chat.encode
    monkeypatch.setattr(
        Chat, "encode", lambda self, scripts: (slowly(), original(self, scripts))[1]
    )
    with pytest.raises(KeyboardInterrupt):
        build(chats, tmp_path / "store", chat="chatml", workers=1, progress=stop)
    monkeypatch.undo()
    sealed = list((tmp_path / "store").glob(".slice-*.json"))
    monkeypatch.setitem(penstock.sources.slices.cut.__kwdefaults__, "slice_bytes", 4_000)
    again = build(chats, tmp_path / "store", chat="chatml")

    assert sealed
    assert again.digest == whole.digest


def slowly():
    import time

    time.sleep(0.15)


def test_a_finished_store_is_kept_and_another_template_is_refused(chats, tmp_path, build):
    store = build(chats, tmp_path / "store", chat="chatml")

    assert build(chats, tmp_path / "store", chat="chatml").digest == store.digest
    with pytest.raises(StoreError, match=r"built differently: chat\.digest"):
        build(chats, tmp_path / "store", chat=PLAIN)
    with pytest.raises(StoreError, match="built differently: chat"):
        build(chats, tmp_path / "store", eos=False)


def test_chats_can_be_appended_with_the_same_template_alone(chats, tmp_path, build):
    build(chats, tmp_path / "store", chat="chatml")
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps(record(1_000)) + "\n{}\n")
    store = build(more, tmp_path / "store", chat="chatml", append=True)

    assert len(store) == 301
    assert store.origin(300).file == more.name
    assert [done["rejects"]["reasons"] for done in store.manifest.contents["builds"]][1] == {
        "bad_shape": 1
    }
    penstock.verify(tmp_path / "store")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(record(1_001)))
    with pytest.raises(StoreError, match="built with other settings"):
        build(other, tmp_path / "store", chat="nanochat", append=True)
    with pytest.raises(StoreError, match="built with other settings"):
        build(other, tmp_path / "store", eos=False, append=True)


def test_a_split_divides_conversations(chats, tmp_path, build):
    build(chats, tmp_path / "store", chat="chatml", split="hash:0.2")
    sides = [penstock.verify(tmp_path / "store" / side) for side in ("train", "val")]

    assert sum(map(len, sides)) == 300
    assert 30 < len(sides[1]) < 90


@pytest.mark.parametrize("kind", ["lines", "array", "parquet", "arrow", "texts", "gzip"])
def test_every_kind_of_input_gives_the_same_tokens(kind, tmp_path, build, gpt2_chat):
    records = [record(number) for number in range(20)]
    lines = [json.dumps(each) for each in records]
    inputs = {
        "lines": lambda: _written(tmp_path / "a.jsonl", "\n".join(lines).encode()),
        "array": lambda: _written(tmp_path / "a.json", json.dumps(records, indent=1).encode()),
        "gzip": lambda: _written(tmp_path / "a.jsonl.gz", gzip.compress("\n".join(lines).encode())),
        "parquet": lambda: _table(tmp_path / "a.parquet", records),
        "arrow": lambda: _table(tmp_path / "a.arrow", records),
        "texts": lambda: penstock.Texts(lines),
    }[kind]()
    store = build(inputs, tmp_path / "store", chat="chatml")
    chat = Chat("chatml", gpt2_chat)
    expected = [chat.render(each) for each in records]

    assert [tokens.tolist() for tokens, _ in documents(store)] == [
        each.tokens.tolist() for each in expected
    ]
    assert [loss.tolist() for _, loss in documents(store)] == [
        each.loss.tolist() for each in expected
    ]


def _written(path, data):
    path.write_bytes(data)
    return path


def _table(path, records):
    table = pa.Table.from_pylist(records)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["lines", "parquet", "arrow", "texts"])
def test_a_column_of_questions_and_one_of_answers_are_conversations(
    kind, tmp_path, data, build, gpt2_chat
):
    lines = (data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    records = [{"id": number, **json.loads(line)} for number, line in enumerate(lines)]
    inputs = {
        "lines": lambda: data / "gsm8k" / "test.jsonl",
        "parquet": lambda: _table(tmp_path / "a.parquet", records),
        "arrow": lambda: _table(tmp_path / "a.arrow", records),
        "texts": lambda: penstock.Texts(lines),
    }[kind]()
    store = build(inputs, tmp_path / "store", chat="chatml", field="question,answer")
    expected = [
        Chat("chatml", gpt2_chat).render(
            {"prompt": each["question"], "completion": each["answer"], "id": 1}
        )
        for each in records
    ]

    assert len(store) == (1_319 if kind == "lines" else 200)
    for (tokens, loss), each in zip(documents(store), expected, strict=False):
        assert np.array_equal(tokens, each.tokens)
        assert np.array_equal(loss, each.loss)


def test_the_columns_are_a_setting_of_the_store_and_win_over_known_formats(tmp_path, build):
    """A record may have the keys of a known format beside the columns that were named."""
    line = json.dumps({**record(1), "q": "Really?", "a": [{"role": "assistant", "content": "Yes"}]})
    store = build(penstock.Texts([line]), tmp_path / "a", chat="nanochat", field="q, a")

    assert store.decode(0).endswith("Really?<|user_end|><|assistant_start|>Yes<|assistant_end|>")
    with pytest.raises(StoreError, match="built differently"):
        build(penstock.Texts([line]), tmp_path / "a", chat="nanochat")


def test_a_record_of_another_shape_is_refused_with_the_columns_to_name(tmp_path, build, invoke):
    path = _written(tmp_path / "a.jsonl", b'{"id": 1, "question": "1 + 1?", "answer": "2"}\n')
    with pytest.raises(SourceError) as error:
        build(path, tmp_path / "a", chat="chatml", max_bad=0)
    assert 'has "id", "question", "answer", which is not a known format' in str(error.value)
    assert 'field="question,answer" (--field question,answer)' in str(error.value)
    with pytest.raises(SourceError) as error:
        build(path, tmp_path / "a", chat="chatml", field="question,response", max_bad=0)
    assert 'has "id", "question", "answer", and no "response"' in str(error.value)
    for field in ("question", "a,b,c", "question,", "question,question"):
        with pytest.raises(StoreError, match="one column of prompts and one of completions"):
            build(path, tmp_path / "a", chat="chatml", field=field)

    words = ("build", path, "-o", tmp_path / "b", "--chat", "chatml", "--add-tokens", "auto")
    invoke(*words, "--field", "question,answer")
    assert "1 + 1?" in invoke("decode", tmp_path / "b").stdout


def test_an_array_that_is_damaged_is_refused(tmp_path, build):
    path = _written(tmp_path / "a.json", b'[{"messages": ')

    with pytest.raises(
        SourceError, match=r"begins with \[ but is not a valid JSON array.*one conversation per"
    ):
        build(path, tmp_path / "store", chat="chatml")


@pytest.mark.parametrize("number", [1, 2, 20])
@pytest.mark.parametrize("spelled", ["lines", "blank", "array", "one line", "indented"])
def test_conversations_may_be_bare_lists_of_messages(number, spelled, tmp_path, build, gpt2_chat):
    """As lines, or as one array of them; a single list of messages is one conversation."""
    records = [record(each)["messages"] for each in range(number)]
    lines = [json.dumps(each, ensure_ascii=False) for each in records]
    data = {
        "lines": "\n".join(lines),
        "blank": "\ufeff\n \n" + "\r\n\n".join(lines) + "\n\n",
        "array": json.dumps(records, indent=1),
        "one line": json.dumps(records),
        "indented": json.dumps(records[0], indent=1),
    }[spelled]
    path = _written(tmp_path / "a.json", data.encode())
    store = build(path, tmp_path / "store", chat="chatml")
    chat = Chat("chatml", gpt2_chat)
    expected = records[:1] if spelled == "indented" else records

    assert [tokens.tolist() for tokens, _ in documents(store)] == [
        chat.render(each).tokens.tolist() for each in expected
    ]


def test_a_line_of_lists_that_is_damaged_is_one_reject(tmp_path, build):
    good = json.dumps(record(1)["messages"])
    path = _written(tmp_path / "a.jsonl", f"{good}\n[1, \n{good}\n".encode())
    store = build(path, tmp_path / "store", chat="chatml")

    assert len(documents(store)) == 2
    assert store.manifest.contents["builds"][0]["rejects"]["reasons"] == {"bad_json": 1}


def test_lists_that_are_lines_are_not_read_whole(tmp_path, build, monkeypatch):
    monkeypatch.setattr("penstock.store.chats._MAX_WHOLE", 2_000)
    lines = [json.dumps(record(each)["messages"]) for each in range(40)]
    path = _written(tmp_path / "a.jsonl", "\n".join(lines).encode())

    assert len(documents(build(path, tmp_path / "store", chat="chatml"))) == 40
    array = _written(tmp_path / "b.json", json.dumps([record(n) for n in range(40)]).encode())
    with pytest.raises(SourceError, match="is read whole"):
        build(array, tmp_path / "other", chat="chatml")


def test_an_end_token_is_put_and_trained_on_where_the_template_has_none(tmp_path, gpt2_chat, build):
    texts = penstock.Texts([json.dumps(record(1))])
    ended = build(texts, tmp_path / "a", chat="chatml")
    put = build(texts, tmp_path / "b", chat=PLAIN)
    without = build(texts, tmp_path / "c", chat=PLAIN, eos=False)
    begun = build(texts, tmp_path / "d", chat=PLAIN, bos=True, eos="<|endoftext|>")

    assert ended.manifest.contents["eos_id"] is None
    assert gpt2_chat.eos_id not in ended.document(0)
    tokens, loss = documents(put)[0]
    assert (tokens[-1], tokens[:-1].tolist()) == (gpt2_chat.eos_id, without.document(0).tolist())
    assert gpt2_chat.decode(tokens[loss == 1]) == " It is 2.\n<|endoftext|>"
    asked = {"messages": [*record(1)["messages"], record(2)["messages"][0]]}
    last = build(penstock.Texts([json.dumps(asked)]), tmp_path / "e", chat=PLAIN)
    assert documents(last)[0][1][-1] == 0  # it ends what the user said
    tokens, loss = documents(begun)[0]
    assert tokens[0] == tokens[-1] == gpt2_chat.eos_id
    assert (tokens == gpt2_chat.eos_id).sum() == 2
    assert loss[0] == 0


def test_the_manifest_says_which_template_and_settings(chats, tmp_path, build, gpt2_chat):
    chat = Chat("chatml", gpt2_chat, rewritten="train", date="2026-01-31")
    store = build(chats, tmp_path / "store", chat=chat)
    told = store.manifest.contents["chat"]

    assert told["template"] == "chatml"
    assert told["digest"] == chat.template.digest
    assert told["rewritten"] == "train"
    assert told["date"] == "2026-01-31"


def test_a_plain_store_says_nothing_of_chats(tmp_path):
    store = penstock.build(penstock.Texts(["one"]), tmp_path / "store")

    assert "chat" not in store.manifest.contents
    assert "loss" not in store.manifest.parts[0].files
    assert summarize(store).num_trained is None


def test_the_summary_counts_the_tokens_that_are_trained_on(chats, tmp_path, build):
    store = build(chats, tmp_path / "store", chat="chatml")
    summary = summarize(store)
    assert summary.documents == "a record"

    assert summary.num_trained == sum(int(loss.sum()) for _, loss in documents(store))
    assert 0 < summary.num_trained < summary.num_tokens
    assert summary.bytes_per_token is None


def test_verify_finds_a_mask_that_is_lost_or_changed(chats, tmp_path, build):
    build(chats, tmp_path / "store", chat="chatml")
    path = tmp_path / "store" / part_file(0, "loss")
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(StoreError, match=r"loss\.npy is damaged"):
        penstock.verify(tmp_path / "store")
    path.unlink()
    with pytest.raises(StoreError, match=r"loss\.npy is missing"):
        penstock.verify(tmp_path / "store")


def test_special_tokens_in_messages_are_text_unless_asked_for(tmp_path, gpt2_chat, build):
    said = {"messages": [{"role": "user", "content": "<|endoftext|>"}, record(1)["messages"][1]]}
    texts = penstock.Texts([json.dumps(said)])
    text = build(texts, tmp_path / "a", chat="chatml")
    parsed = build(texts, tmp_path / "b", chat=Chat("chatml", gpt2_chat, special_in_content=True))

    assert gpt2_chat.eos_id not in text.document(0)
    assert gpt2_chat.eos_id in parsed.document(0)


def test_the_command_line_builds_a_chat_store(chats, tmp_path, invoke):
    store = tmp_path / "store"
    words = ("build", chats, "--chat", "chatml", "--add-tokens", "auto", "--max-bad", 10)
    invoke(*words, "-o", store)
    told = invoke("info", store).stdout

    assert read_manifest(store).contents["chat"]["template"] == "chatml"
    assert "trained" in told
    assert "%" in told
    dated = tmp_path / "dated"
    invoke(*words, "-o", dated, "--chat-date", "2026-01-31")
    assert read_manifest(dated).contents["chat"]["date"].startswith("2026-01-31")
    failed = invoke("build", chats, "-o", dated, "--chat-date", "2026-01-31", code=2)
    assert "set --chat" in failed.stderr


def test_the_shared_sets_are_built_with_exact_masks(data, tmp_path, gpt2_chat, build):
    store = build(sorted((data / "chat").iterdir()), tmp_path / "store", chat="chatml", max_bad=5)
    (done,) = store.manifest.contents["builds"]

    assert len(store) == 2473
    assert done["rejects"]["reasons"] == {"nothing_to_train": 1}
    tokens, loss = documents(store)[0]
    first = json.loads((data / "chat" / "alpaca_en_demo.json").read_bytes())[0]
    assert gpt2_chat.decode(tokens[loss == 1]) == first["output"] + "<|im_end|>"
    assert Path(store.origin(0).file).name == "alpaca_en_demo.json"
