"""A damaged store is made whole again from its inputs, to the recorded digests, or not at all."""

import gzip
import json
import os
import random
import shutil
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.errors import StoreBusyError, StoreError
from penstock.sources.settings import Texts
from penstock.store.lock import locked
from penstock.store.manifest import manifest_bytes, read_manifest

pytestmark = pytest.mark.usefixtures("small_slices")


def build(inputs, store, **settings):
    settings = {"tokenizer": "bytes", "documents": "lines", "max_bad": 10, **settings}
    return penstock.build(inputs, store, **settings)


def parts(store, pattern="part-*"):
    return sorted(path for path in store.rglob(pattern) if ".rows" not in path.parts)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def repaired(store, *arguments, **settings):
    """The names of the files that a repair replaced; afterwards the store is whole."""
    found = penstock.repair(store, *arguments, **settings)
    for side in ("train", "val") if (store / "train").is_dir() else ("",):
        penstock.verify(store / side)
    assert not (store / ".repair").exists()
    assert penstock.repair(store, *arguments, **settings) == []
    return [path.name for path in found]


@pytest.fixture
def store(built, tmp_path):
    return tmp_path / "store"


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.unlink(), lambda path: os.truncate(path, 5)],
    ids=["flipped", "missing", "cut"],
)
def test_any_file_of_a_part_is_made_again(damage, store, sums):
    before = sums(store)
    for path in [*parts(store)[::2], store / "rejects.jsonl"]:
        times = {each: each.stat().st_mtime_ns for each in parts(store) if each != path}
        damage(path)
        assert repaired(store) == [path.name]
        assert sums(store) == before
        # The other files were not written.
        assert times == {each: each.stat().st_mtime_ns for each in times}


def test_all_files_but_the_manifest_are_made_again(store, sums):
    before = sums(store)
    for path in [*parts(store), store / "rejects.jsonl"]:
        path.unlink()

    assert len(repaired(store)) == len(before) - 1
    assert sums(store) == before


def test_progress_is_reported_while_the_store_is_read(store):
    reports = []
    penstock.repair(store, progress=reports.append)

    size = sum(path.stat().st_size for path in parts(store))
    assert (reports[-1].done_bytes, reports[-1].total_bytes) == (size, size)
    assert len(reports) == len(parts(store))


def test_an_intact_store_is_not_touched(store):
    before = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    assert penstock.repair(store) == []
    assert {path: path.stat().st_mtime_ns for path in store.iterdir()} == before


@pytest.mark.parametrize("split", ["hash:0.3", "tail:0.3"])
@pytest.mark.parametrize("given", ["", "train", "val"])
def test_both_sides_of_a_split_are_repaired(split, given, inputs, tmp_path, sums):
    store = tmp_path / "store"
    build(inputs, store, split=split)
    before = sums(store)
    damaged = [parts(store / side, "*.tokens.npy")[0] for side in ("train", "val")]
    for path in damaged:
        flip(path)

    assert sorted(penstock.repair(store / given)) == damaged
    assert sums(store) == before


def test_one_side_that_was_copied_alone_is_repaired(inputs, tmp_path, sums):
    build(inputs, tmp_path / "store", split="hash:0.3")
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path / "store" / "val", alone)
    before = sums(alone)
    flip(parts(alone, "*.bounds.npy")[1])

    assert len(repaired(alone, inputs)) == 1
    assert sums(alone) == before


def test_every_build_of_an_appended_store_is_repaired(store, tmp_path, sums):
    more = tmp_path / "elsewhere" / "more.txt"
    more.parent.mkdir()
    more.write_text("".join(f"appended line {number}\n" for number in range(900)) + "bad \0\n")
    build(more, store, append=True)
    before, all_parts = sums(store), parts(store, "*.tokens.npy")
    for path in (all_parts[0], all_parts[-1], store / "rejects-00001.jsonl"):
        flip(path) if path.stat().st_size else path.unlink()

    assert len(repaired(store)) == 3
    assert sums(store) == before


@pytest.mark.parametrize("kind", ["txt.gz", "jsonl", "parquet", "csv"])
def test_parts_of_every_kind_of_input_are_repaired(kind, tmp_path, sums):
    lines = [f"line {number} of some text" for number in range(900)]
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": lines}), path, row_group_size=150)
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    elif kind == "csv":
        path.write_text("text\n" + "\n".join(lines))
    else:
        path.write_bytes(gzip.compress("\n".join(lines).encode(), 0, mtime=0))
    store = tmp_path / "store"
    build(path, store)
    before = sums(store)
    for each in parts(store)[1::4]:
        flip(each)

    assert len(repaired(store)) > 1
    assert sums(store) == before


def test_pieces_of_one_document_are_repaired(tmp_path, sums):
    path, store = tmp_path / "one.txt", tmp_path / "store"
    path.write_text("".join(f"line {number} of one document\n" for number in range(700)))
    build(path, store, documents="auto")
    before = sums(store)
    assert penstock.TokenStore(store).manifest.num_documents == 1
    for each in parts(store)[::2]:
        flip(each)

    assert len(repaired(store)) > 3
    assert sums(store) == before


def test_the_settings_of_the_tokenizer_are_those_of_the_store(tmp_path, sums):
    path, store = tmp_path / "a.txt", tmp_path / "store"
    path.write_text("one <|endoftext|> two <|more|>\n" * 300)
    settings = {"special_tokens": "parse", "add_tokens": ["<|more|>"], "bos": True}
    build(path, store, tokenizer="gpt2", **settings)
    before = sums(store)
    flip(parts(store, "*.tokens.npy")[0])

    assert len(repaired(store)) == 1
    assert sums(store) == before


def chats(path, number=300):
    answer = {"role": "assistant", "content": "ok"}
    lines = [
        {"messages": [{"role": "user", "content": f"{each} + 1?"}, answer]}
        for each in range(number)
    ]
    lines[7] = {"messages": "none"}
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_chats_are_repaired(tmp_path, sums):
    path, store = chats(tmp_path / "chats.jsonl"), tmp_path / "store"
    settings = {"tokenizer": "bytes", "chat": "chatml", "add_tokens": "auto"}
    penstock.build(path, store, max_bad=10, **settings)
    before = sums(store)
    for damaged in [*parts(store)[::3], store / "rejects.jsonl"]:
        flip(damaged)
    assert any(each.name.endswith("loss.npy") for each in parts(store))

    assert len(repaired(store)) > 1
    assert sums(store) == before


def test_a_chat_template_that_is_not_built_in_must_be_given(tmp_path, sums):
    from penstock.chat.template import load_template

    template = tmp_path / "mine.jinja"
    template.write_text(load_template("chatml").source + "{# mine #}")
    path, store = chats(tmp_path / "chats.jsonl"), tmp_path / "store"
    settings = {"tokenizer": "bytes", "chat": str(template), "add_tokens": "auto"}
    penstock.build(path, store, max_bad=10, **settings)
    before = sums(store)
    flip(parts(store, "*.loss.npy")[0])
    damaged = sums(store)

    with pytest.raises(StoreError, match=r"not in the store\. Give it with chat= \(--chat\)"):
        penstock.repair(store)
    with pytest.raises(StoreError, match=r"and the template chatml has the digest"):
        penstock.repair(store, chat="chatml")
    assert sums(store) == damaged
    assert len(repaired(store, chat=template)) == 1
    assert sums(store) == before


def test_texts_must_be_given_again(tmp_path, sums):
    texts, store = Texts([f"text {number}" for number in range(900)]), tmp_path / "store"
    build(texts, store)
    before = sums(store)
    flip(parts(store, "*.tokens.npy")[1])
    damaged = sums(store)

    for given in (None, tmp_path, Texts(["other"])):
        with pytest.raises(StoreError, match=r"was in memory, and must be given again as inputs=T"):
            penstock.repair(store, given)
    assert sums(store) == damaged
    assert len(repaired(store, texts)) == 1
    assert sums(store) == before


def test_inputs_are_found_where_they_were_or_where_the_user_says(store, inputs, tmp_path, sums):
    before = sums(store)
    moved = tmp_path / "moved"
    for given in ("nothing", "directory", "directories", "files"):
        flip(parts(store, "*.tokens.npy")[0])
        flip(parts(store, "*.tokens.npy")[-1])
        if given == "nothing":
            assert len(repaired(store)) == 2
            inputs.rename(moved)
            continue
        with pytest.raises(
            StoreError, match=r"2 of its 2 inputs cannot be used: a\.txt is missing"
        ):
            penstock.repair(store)
        wrong, files = tmp_path / "clean", [moved / "a.txt", moved / "b.jsonl"]
        places = {"directory": moved, "directories": [wrong, moved], "files": files}
        assert len(repaired(store, places[given])) == 2
    assert sums(store) == before


def test_without_its_stamps_a_store_asks_for_the_inputs(store, inputs, tmp_path):
    (tmp_path / ".store.stamps.json").unlink()
    flip(parts(store)[0])

    with pytest.raises(StoreError, match=r"inputs cannot be used: a.*--inputs"):
        penstock.repair(store)
    assert len(repaired(store, inputs)) == 1


def test_an_input_that_is_not_needed_may_be_missing(store, inputs):
    """The part is made of a.txt, and both files are plain."""
    (inputs / "b.jsonl").unlink()
    flip(parts(store, "*.tokens.npy")[0])

    assert len(repaired(store)) == 1


def test_a_changed_input_is_named_with_the_expected_digest(store, inputs, sums):
    flip(parts(store, "*.tokens.npy")[0])
    damaged, path = sums(store), inputs / "a.txt"
    data = path.read_bytes()
    (expected,) = (
        each["xxh3_128"]
        for each in penstock.TokenStore(store).manifest.inputs
        if each["name"] == "a.txt"
    )
    path.write_bytes(data.replace(b"line 1 ", b"LINE 1 "))
    with pytest.raises(StoreError, match=rf"a\.txt has the digest \w+…, .* built from {expected}"):
        penstock.repair(store)
    path.write_bytes(data + b"more\n")
    with pytest.raises(StoreError, match=rf"a\.txt has [\d,]+ bytes \(text\).*digest {expected}"):
        penstock.repair(store)
    assert sums(store) == damaged
    assert not (store / ".repair").exists()
    path.write_bytes(data)
    assert len(repaired(store)) == 1


def test_another_input_with_the_recorded_digest_changes_nothing(store, inputs, tmp_path, sums):
    """As if somebody had made a file with the same XXH3-128."""
    path = inputs / "a.txt"
    path.write_bytes(path.read_bytes().replace(b"line 1 ", b"LINE 1 "))
    other = build(inputs, tmp_path / "other").manifest
    manifest = penstock.TokenStore(store).manifest
    contents = manifest.contents
    del contents["digest"]
    contents["builds"][0]["inputs"] = other.builds[0]["inputs"]
    (store / "penstock.json").write_bytes(manifest_bytes(contents, list(manifest.parts)))
    flip(parts(store, "*.tokens.npy")[0])
    damaged = sums(store)

    with pytest.raises(StoreError, match="would get other contents than were recorded"):
        penstock.repair(store, inputs=[inputs])
    assert sums(store) == damaged


def test_another_tokenizer_is_refused(store, sums):
    flip(parts(store)[0])
    damaged = sums(store)

    with pytest.raises(StoreError, match=r"tokenized with bytes .* and gpt2 has the digest"):
        penstock.repair(store, tokenizer="gpt2")
    assert sums(store) == damaged


def test_a_damaged_manifest_is_not_repaired(store):
    flip(store / "penstock.json")

    with pytest.raises(StoreError, match=r"penstock\.json was changed after it was written"):
        penstock.repair(store)


def test_an_unfinished_append_must_be_finished_first(store, tmp_path):
    (tmp_path / "more.txt").write_text("line\n" * 2_000)

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "more.txt", store, append=True, progress=stop)
    with pytest.raises(StoreError, match=r"not finished\. Repeat it to finish it"):
        penstock.repair(store)


def test_a_store_that_is_being_written_is_not_repaired(store):
    flip(parts(store)[0])
    with locked(store), pytest.raises(StoreBusyError):
        penstock.repair(store)


def test_a_link_in_the_place_of_the_work_directory_is_not_followed(store, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("mine")
    (store / ".repair").symlink_to(mine)
    flip(parts(store)[0])

    assert len(repaired(store)) == 1
    assert (mine / "file").read_text() == "mine"


def test_if_an_input_of_one_build_is_missing_no_build_is_changed(store, inputs, tmp_path, sums):
    more = tmp_path / "more.txt"
    more.write_text("".join(f"appended line {number}\n" for number in range(300)))
    build(more, store, append=True)
    all_parts = parts(store, "*.tokens.npy")
    flip(all_parts[0])
    flip(all_parts[-1])
    damaged = sums(store)
    more.rename(tmp_path / "moved.txt")

    with pytest.raises(StoreError, match=r"more\.txt is missing"):
        penstock.repair(store)
    assert sums(store) == damaged
    (tmp_path / "moved.txt").rename(more)
    assert len(repaired(store)) == 2


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch], ids=["pipe", "file"])
def test_what_is_in_the_place_of_the_work_directory_is_replaced_and_not_waited_for(make, store):
    make(store / ".repair")
    flip(parts(store)[0])

    assert len(repaired(store)) == 1


def test_a_side_that_is_a_link_is_not_written(inputs, tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    build(inputs, mine, split="hash:0.3")
    flip(parts(mine / "train")[0])
    damaged = parts(mine / "train")[0].read_bytes()
    shutil.copytree(mine / "val", other / "val")
    (other / "train").symlink_to(mine / "train")

    with pytest.raises(StoreError, match=r"train is a link to .*Delete the link"):
        penstock.repair(other, inputs)
    assert parts(mine / "train")[0].read_bytes() == damaged


def test_no_file_is_opened_because_the_store_names_it(store, inputs, tmp_path):
    """The times of inputs inside a store are of earlier versions, and may come from anybody."""
    (tmp_path / ".store.stamps.json").unlink()
    (store / ".stamps.json").write_text(json.dumps({str(path): "1" for path in inputs.iterdir()}))
    flip(parts(store)[0])
    with pytest.raises(StoreError, match=r"a\.txt is missing"):
        penstock.repair(store)
    (tmp_path / "empty").mkdir()
    for name in (str(inputs / "a.txt"), "../inputs/a.txt"):
        rewritten(store, lambda build, name=name: build["inputs"][0].update(name=name))
        with pytest.raises(StoreError, match=r"a\.txt is missing"):
            penstock.repair(store, tmp_path / "empty")


@pytest.mark.parametrize("odd", [{"documents": 5}, {"field": 5}, {"max_expansion": "x"}, {"x": 1}])
def test_odd_settings_in_a_manifest_are_refused(odd, store):
    rewritten(store, lambda build: build["reading"].update(odd))
    flip(parts(store)[0])

    with pytest.raises(StoreError, match=r"a setting that this version of penstock does not know"):
        penstock.repair(store)


def rewritten(store, change):
    """Change the first build of a manifest, as somebody who ships a store can do."""
    manifest = read_manifest(store)
    contents = {key: value for key, value in manifest.contents.items() if key != "digest"}
    change(contents["builds"][0])
    (store / "penstock.json").write_bytes(manifest_bytes(contents, list(manifest.parts)))


def test_seeded_damage_is_repaired(store, sums):
    before, chance = sums(store), random.Random(5)
    for _ in range(15):
        for path in chance.sample(parts(store), chance.randrange(1, 5)):
            data = bytearray(path.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        penstock.repair(store)
        assert sums(store) == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.torture)])
def test_a_repair_that_is_killed_can_be_repeated(every, killed, store, tmp_path, sums, figure):
    """Killed before every n-th call that touches the disk; files are whole or still damaged."""
    before, kept = sums(store), tmp_path / "kept"
    for path in parts(store, "*.tokens.npy")[1:3]:
        flip(path)
    damaged = sums(store)
    shutil.copytree(store, kept)
    for point in count(1, every):
        shutil.rmtree(store)
        shutil.copytree(kept, store)
        if not killed(lambda: penstock.repair(store), point):
            break
        now = {name: digest for name, digest in sums(store).items() if ".repair" not in name}
        assert all(now[name] in (before[name], damaged[name]) for name in before)
        penstock.repair(store)
        assert sums(store) == before, f"killed before call {point}"
    figure(f"a repair killed before every {every}. of its {point - 1} calls that touch the disk")
    assert point > 10


def test_read_back_finds_a_disk_that_does_not_keep_what_was_written(
    inputs, tmp_path, bytewise, monkeypatch
):
    build(inputs, tmp_path / "good", read_back=True)
    whole = penstock.verify(tmp_path / "good").digest
    assert build(inputs, tmp_path / "other").digest == whole

    # A disk that changes a byte of a file after it was synced.
    renamed = os.rename

    def rename(old, new, *, src_dir_fd, dst_dir_fd):
        if new == "part-00001.tokens.npy":
            flip(Path(f"/proc/self/fd/{src_dir_fd}/{old}"))
        renamed(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        with pytest.raises(StoreError, match=r"part-00001\.tokens\.npy was read back with other c"):
            build(inputs, tmp_path / "bad", read_back=True)
    assert build(inputs, tmp_path / "bad", read_back=True).digest == whole


def test_large_parts_are_read_back_past_the_page_cache(tmp_path):
    """More than a megabyte, so that several blocks are read directly, and the last one is short."""
    from penstock.store.files import refuse_unlike, write_file

    for size in (0, 1, 4_095, 4_096, 1 << 20, (5 << 20) + 12_345):
        path = tmp_path / "file"
        _, digest = write_file(path, [random.Random(size).randbytes(size)])
        refuse_unlike(path, digest)
        if size:
            flip(path)
            with pytest.raises(StoreError, match="was read back with other contents"):
                refuse_unlike(path, digest)
