"""ReadSettings: any document, any run of tokens, from threads, forks and other processes."""

import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.errors import StoreError
from penstock.sources.settings import Texts
from penstock.sources.slices import cut
from penstock.tokenize import train_tokenizer

TEXTS = [f"{number} " + "word " * (number % 7) for number in range(200)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two hundred documents in about ten parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cut.__kwdefaults__, "slice_bytes", 400)
        return penstock.build(Texts(TEXTS), tmp_path_factory.mktemp("r"), tokenizer="bytes")


@pytest.fixture(scope="module")
def flat():
    """The tokens of all documents in one list, each with its end."""
    return [token for text in TEXTS for token in [*text.encode(), 256]]


def test_documents_are_found_by_number_from_either_end(store):
    assert (len(store), store.num_tokens) == (200, sum(len(text) + 1 for text in TEXTS))
    for number, text in enumerate(TEXTS):
        assert store.document(number).tolist() == [*text.encode(), 256]
        assert store.decode(number - 200) == text


def test_decode_gives_str_everywhere_and_bytes_on_request(store, tmp_path):
    tokenizer = penstock.load_tokenizer("bytes")
    half = "é".encode()[:1]

    assert store.decode(3) == tokenizer.decode(store.document(3)[:-1]) == TEXTS[3]
    assert store.decode_bytes(3) == tokenizer.decode_bytes(store.document(3)[:-1])
    assert store.decode_bytes(3) == TEXTS[3].encode()
    # Ids may end inside a character.
    assert tokenizer.decode([97, *half]) == "a\ufffd"
    assert tokenizer.decode([97, *half], errors="ignore") == "a"
    assert tokenizer.decode_bytes([97, *half]) == b"a" + half
    with pytest.raises(UnicodeDecodeError, match="unexpected end of data"):
        tokenizer.decode([97, *half], errors="strict")


@pytest.mark.parametrize("number", [200, -201, 10**9])
def test_a_document_that_is_not_there_is_an_index_error(store, number):
    for method in (store.document, store.origin, store.decode):
        with pytest.raises(IndexError, match=rf"document {number:,} is not in a store of 200"):
            method(number)


@given(edges=st.tuples(st.integers(0, 3_100), st.integers(0, 3_100)))
def test_tokens_run_across_parts(store, flat, edges):
    start, stop = sorted(min(edge, len(flat)) for edge in edges)

    assert store.tokens(start, stop).tolist() == flat[start:stop]
    assert store.tokens(start, stop).dtype == store.dtype == np.uint16


@pytest.mark.parametrize("edges", [(-1, 3), (5, 4), (0, 10**9)])
def test_tokens_that_are_not_there_are_an_index_error(store, edges):
    with pytest.raises(IndexError, match="are not in a store of"):
        store.tokens(*edges)


def test_iteration_gives_every_document_in_order(store):
    assert [bytes(tokens[:-1].astype(np.uint8)).decode() for tokens in store] == TEXTS


def test_parts_add_up(store):
    assert len(store.manifest.parts) > 5
    lengths = [len(store.part_array(i, "tokens")) for i in range(len(store.manifest.parts))]
    assert lengths == [part.num_tokens for part in store.manifest.parts]
    assert sum(lengths) == store.num_tokens


def test_an_origin_names_the_input_and_the_place_in_it(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    inputs = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    store = penstock.build(inputs, tmp_path / "s", tokenizer="bytes", documents="lines", max_bad=10)
    origins = [(store.origin(i).file, store.origin(i).offset) for i in range(4)]

    one, two = (path.name for path in inputs)
    assert origins == [(one, 0), (one, 5), (two, 0), (two, 14)]


def test_arrays_cannot_be_written_to(store):
    with pytest.raises(ValueError, match="read-only"):
        store.document(0)[0] = 7


def test_numpy_alone_reads_a_store(store):
    """No penstock needed: plain .npy files, documents end to end, bounds beside them."""
    tokens = np.load(store.path / "part-00000.tokens.npy", mmap_mode="r", allow_pickle=False)
    bounds = np.load(store.path / "part-00000.bounds.npy", allow_pickle=False)
    origin = np.load(store.path / "part-00000.origin.npy", allow_pickle=False)

    assert bytes(tokens[: int(bounds[0]) - 1].astype(np.uint8)).decode() == TEXTS[0]
    assert origin.shape == (len(bounds), 2)
    assert len(tokens) == bounds[-1]


def test_a_store_survives_pickling(store):
    again = pickle.loads(pickle.dumps(store))

    assert again.digest == store.digest
    assert again.decode(100) == TEXTS[100]
    assert len(pickle.dumps(store)) < 1_000


def test_a_pickled_store_that_changed_since_is_refused(tmp_path):
    store = penstock.build(Texts(["one"]), tmp_path / "s", tokenizer="bytes")
    pickled = pickle.dumps(store)
    penstock.build(Texts(["two"]), tmp_path / "s", tokenizer="bytes", append=True)

    with pytest.raises(StoreError, match="changed after the store was pickled"):
        pickle.loads(pickled)


def test_many_threads_read_what_one_reads(store):
    numbers = [number * 7919 % 200 for number in range(4_000)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(store.decode, numbers))

    assert found == [TEXTS[number] for number in numbers]


def _read_all(store, answers):
    answers.put([store.decode(number) for number in range(len(store))])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    "method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.torture)]
)
def test_another_process_reads_the_same_and_so_does_this_one_afterwards(store, method):
    store.decode(0)
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=_read_all, args=(store, answers))
    child.start()

    assert answers.get(timeout=60) == TEXTS
    child.join(timeout=60)
    assert child.exitcode == 0
    assert store.decode(199) == TEXTS[199]


def test_the_repr_says_what_it_is(store):
    assert repr(store).endswith(f": 200 documents, {store.num_tokens:,} tokens, bytes)")


def test_a_path_may_be_a_string_or_a_path(store):
    assert penstock.TokenStore(str(store.path)).digest == store.digest


def test_a_path_that_names_another_tokenizer_by_now_is_loaded_again(tmp_path, monkeypatch):
    """Two directories may each have a file of the same relative name."""
    for name, words in (("one", ["to be or not to be"]), ("two", ["the cat sat on the mat"])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        train_tokenizer(Texts(words * 50), "own.json", vocab_size=258)
        store = penstock.build(Texts(words), "store", tokenizer="own.json")

        assert store.decode(0) == words[0]


def test_a_store_and_its_rows_survive_a_change_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    penstock.build(penstock.Texts(["one two", "three"]), "store", tokenizer="bytes")
    np.save("ids.npy", np.arange(99, dtype=np.uint16))
    store, rows = penstock.TokenStore("store"), penstock.Windows("store", 4)
    packs, array = penstock.Packs("store", 4), penstock.Windows("ids.npy", 4)

    monkeypatch.chdir("elsewhere")

    assert (store.decode(0), str(store.path)) == ("one two", "store")
    assert all(each[0] is not None for each in (rows, packs, array))
    assert pickle.loads(pickle.dumps(store)).decode(1) == "three"
    assert "'store'" in repr(store)


def test_a_stream_survives_a_change_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\ntwo\n" * 5000)
    streamed = penstock.stream("a.txt", "store", tokenizer="bytes", documents="lines")

    monkeypatch.chdir("elsewhere")

    with streamed:
        assert sum(1 for _ in streamed) == 10_000
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_store_has_its_tokenizer_with_the_tokens_that_were_added(tmp_path):
    text = "<|im_start|>user\nHi<|im_end|>"
    added = ["<|im_start|>", "<|im_end|>"]
    tokenizer = penstock.load_tokenizer("gpt2", special_tokens="parse", add_tokens=added)
    made = penstock.build(Texts([text]), tmp_path / "store", tokenizer=tokenizer, eos=False)
    opened = penstock.TokenStore(tmp_path / "store")

    assert opened.load_tokenizer().decode(opened.tokens(0, made.num_tokens)) == text
    assert opened.load_tokenizer().digest == opened.tokenizer_record["digest"]
