"""JSON Lines against `json.loads`, line by line; every kind of bad line has its reason."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.sources.jsonl import json_problem

GOOD = b'{"text": "good"}'


def one_reject(read, folder, line, **options):
    """The reason and detail for `line`, which stands between two good ones."""
    (folder / "a.jsonl").write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    found = read(folder / "a.jsonl", **options)
    assert found.texts == [b"good", b"good"]
    (reject,) = found.rejects
    assert (reject.file, reject.offset, reject.num_bytes) == (0, len(GOOD) + 1, len(line))
    assert found.tally.total_bytes == len(line) + 2 * len(GOOD) + 3
    return reject.reason, reject.detail


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b"{", "bad_json", "a value or name is missing after character 1"),
        (b"hello", "bad_json", "a value or name is missing after character 0"),
        (b'{"text": "a"', "bad_json", "a comma or bracket is missing after character 12"),
        (b'{"text": "a",}', "bad_json", "a value or name is missing after character 12"),
        (b'{"text": "a", "x": [1, ]}', "bad_json", "a value or name is missing after character 21"),
        (b'{"text": "a", "x": NaN}', "bad_json", "NaN is not JSON"),
        (b'{"text": "a\\\\", "x": NaN, "y": " NaN"}', "bad_json", "NaN is not JSON"),
        (b'{"t\\"": " NaN \\\\\\" NaN", "x": -Infinity}', "bad_json", "Infinity is not JSON"),
        (b'{"text": "a", "x": -Infinity}', "bad_json", "-Infinity is not JSON"),
        (b'{"text": "a", "x": Inf}', "bad_json", "a value or name is missing"),
        (b'{"text": "a", "x":\rNaN}', "bad_json", "NaN is not JSON"),
        (b'{"text": "a", "x": 01}', "bad_json", "a comma or bracket is missing"),
        (b'{"text": "tab\there"}', "bad_json", "a string has a control character"),
        (b'{"text": "nul\x00here"}', "bad_json", "a string has a control character"),
        (b'{"text": "a"}\x00}', "bad_json", "more follows"),
        (b'{"text": "a"} {"text": "b"}', "bad_json", "more follows"),
        (b'{"text": "a"}{"text": "b"}', "bad_json", "more follows"),
        (b'\xef\xbb\xbf{"text": "a"}', "bad_json", "byte order mark"),
        (b'{"text": "a", "text": "b"}', "duplicate_field", '"text" is given 2 times'),
        (b'{"txt": "a", "id": 1}', "missing_field", 'no field "text"; it has "txt", "id"'),
        (b"{}", "missing_field", "no fields"),
        (b'{"text": null}', "not_a_string", '"text" holds null'),
        (b'{"text": 7}', "not_a_string", "a number"),
        (b'{"text": 7.5}', "not_a_string", "a number"),
        (b'{"text": true}', "not_a_string", "a boolean"),
        (b'{"text": ["a"]}', "not_a_string", "a list"),
        (b'{"text": {"n": 1}}', "not_a_string", '"text" holds an object'),
        (b'["text"]', "not_an_object", "the record holds a list"),
        (b'"text"', "not_an_object", "the record holds a string"),
        (b"17", "not_an_object", "the record holds a number"),
        (b'{"text": "\\ud800"}', "invalid_utf8", "a lone surrogate at character 0"),
        (b'{"text": "ab\\udc00"}', "invalid_utf8", "a lone surrogate at character 2"),
        (b'{"text": "\xff"}', "invalid_utf8", "invalid start byte"),
        (b'{"text": "a", "other": "\xff"}', "invalid_utf8", "invalid start byte"),
        (b"[" * 100_000, "nested_too_deep", "more levels"),
        (b'{"text":"a","x":' + b"[" * 100_000 + b"}", "nested_too_deep", "more levels"),
        (b'{"text": ' + b"9" * 5_000 + b"}", "not_a_string", "a number"),
    ],
    ids=lambda value: repr(value[:30]) if isinstance(value, bytes) else "",
)
def test_a_bad_line_is_rejected_with_its_reason(read, tmp_path, line, reason, detail):
    found, why = one_reject(read, tmp_path, line)

    assert found == reason
    assert detail in why


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "a", "n": ' + b"9" * 5_000 + b"}", "a"),
        (b'{"text": "a", "n": 1e999}', "a"),
        (b'{"text": "a", "x": "\\ud800"}', "a"),
        (b'{"x": 1, "x": 2, "text": "a"}', "a"),
        (b' \t{"text": "a"} \r', "a"),
        (b'{"text": "a"}\r', "a"),
        (b'{"te\\u0078t": "\\u0000\\ud83d\\ude00\\n"}', "\0😀\n"),
        (b'{"text": "NaN and Infinity"}', "NaN and Infinity"),
        (b'{"text": "\\\\\\" NaN, Infinity", "x": "\\" NaN"}', '\\" NaN, Infinity'),
        ('{"text": "a\u2028b\u0085"}'.encode(), "a\u2028b\u0085"),
        (b'{"text": "a", "x": ' + b"[" * 499 + b"]" * 499 + b"}", "a"),
        (b'{"text": "a", "x": [' + b"[],{}," * 10_000 + b"1]}", "a"),
    ],
    ids=range(12),
)
@pytest.mark.parametrize("neighbour", [b"", b"not json\n"])
def test_odd_but_valid_lines_are_read(read, tmp_path, line, text, neighbour):
    (tmp_path / "a.jsonl").write_bytes(neighbour + line + b"\n")
    found = read(tmp_path / "a.jsonl")

    assert found.texts == [text.encode()]
    assert len(found.rejects) == bool(neighbour)


def test_an_object_spread_over_lines_is_so_many_bad_lines(read, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text":\n"a"}\n{"text": "b",\n"x":{}\n}\n{"text": "c"}')
    found = read(tmp_path / "a.jsonl")

    assert found.texts == [b"c"]
    assert found.reasons == ["bad_json"] * 5


def test_a_byte_order_mark_before_the_first_object_is_no_part_of_it(read, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD)
    found = read(tmp_path / "a.jsonl")

    assert (found.texts, found.places) == ([b"good"], [(0, 3)])


@pytest.mark.parametrize("neighbour", [b"", b"not json\n"])
def test_a_nested_field_is_named_with_a_dot(read, tmp_path, neighbour):
    lines = [
        b'{"a": {"b": "x", "c": 1}}',
        b'{"a": {"b": "y"}, "b": "no"}',
        b'{"a": {}}',
        b'{"a": null}',
        b'{"a": "b"}',
        b"{}",
        b'{"a": {"b": null}}',
        b'{"a.b": "flat"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(neighbour + b"\n".join(lines))
    found = read(tmp_path / "a.jsonl", field="a.b")

    assert found.texts == [b"x", b"y"]
    assert found.reasons[-6:] == [
        "missing_field",
        "not_an_object",
        "not_an_object",
        "missing_field",
        "not_a_string",
        "missing_field",
    ]


def test_replace_mends_bad_bytes_and_lone_surrogates_and_counts_the_documents(read, tmp_path):
    lines = [
        b'{"text": "a\xff"}',
        b'{"text": "b\\ud800"}',
        b'{"text": "c\\ufffd"}',
        b'{"text": "d\xef\xbf\xbd"}',
        b'{"text": "e\xef\xbf\xbd\xff"}',
        b'{"text": "f", "x": "\xff"}',
    ]
    expected = ["a\ufffd", "b\ufffd", "c\ufffd", "d\ufffd", "e\ufffd\ufffd", "f"]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    found = read(tmp_path / "a.jsonl", errors="replace")

    assert [text.decode() for text in found.texts] == expected
    assert found.tally.replaced == 3
    assert found.rejects == []


def reference(data):
    """Texts of the lines that are valid, by Python's own parser; None for a line that is not."""
    for line in data.split(b"\n"):
        if not line.strip(b" \t\r"):
            continue
        try:
            pairs = json.loads(line.decode(), object_pairs_hook=list, parse_constant=int)
            (text,) = [value for key, value in pairs if key == "text"]
            yield text.encode() if isinstance(text, str) else None
        except (ValueError, TypeError):
            yield None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
objects = st.dictionaries(st.sampled_from(["text", "x", "y"]), values, max_size=3)
texts = st.fixed_dictionaries({"text": st.text(max_size=20)}, optional={"x": values})
spelled = st.builds(
    lambda value, ascii_only: json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "replace"),
    texts | texts | objects | values,
    st.booleans(),
)
mutated = st.builds(
    lambda line, place, junk: line[: place % (len(line) + 1)] + junk + line[place % 7 :],
    spelled,
    st.integers(0, 99),
    st.sampled_from(
        [b"", b'"', b"}", b"{", b"\\", b"\x00", b"\xff", b"\r", b",", b"NaN", b" NaN", b"\\ud800"]
    ),
)


def blocks(lines):
    return st.lists(lines, max_size=8).map(b"\n".join)


def check(data, read, scratch):
    (scratch / "law.jsonl").write_bytes(data)
    wanted = list(reference(data))
    found = read(scratch / "law.jsonl")

    assert found.texts == [text for text in wanted if text is not None and text.strip(b" \t\r\n")]
    assert len(found.rejects) == wanted.count(None)
    return found


@given(data=blocks(spelled))
def test_valid_lines_give_what_the_reference_gives(data, read, scratch):
    check(data, read, scratch)


@given(data=blocks(spelled | mutated))
@example(data=b'{"text":"a","x":"\xff"}')
def test_both_paths_give_what_the_reference_gives_on_any_lines(data, read, scratch):
    """A line that is no JSON sends the whole block down the slow path."""
    if data.startswith(b"\xef\xbb\xbf"):
        return
    fast = check(data, read, scratch)
    slow = check(data + b"\nnot json", read, scratch)

    assert slow.texts == fast.texts
    assert slow.rejects[:-1] == fast.rejects


@given(data=blocks(spelled | mutated), block=st.integers(1, 64), slice_bytes=st.integers(1, 80))
def test_documents_and_rejects_do_not_depend_on_blocks_or_slices(
    data, block, slice_bytes, read, scratch
):
    (scratch / "blocks.jsonl").write_bytes(b"\n" + data)
    whole = read(scratch / "blocks.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.read.BLOCK_BYTES", block)
        cut = read(scratch / "blocks.jsonl", slice_bytes=slice_bytes)

    assert (cut.texts, cut.places, cut.rejects) == (whole.texts, whole.places, whole.rejects)
    assert cut.tally == whole.tally


@pytest.mark.parametrize("neighbour", [b"", b"not json"])
@pytest.mark.parametrize("depth", [500, 100_000])
def test_a_field_nested_without_end_does_not_cost_the_text_beside_it(
    read, tmp_path, depth, neighbour
):
    """It is valid JSON; Python's parser gives up on it and Arrow's does not."""
    line = b'{"text":"a","x":' + b"[" * depth + b"]" * depth + b"}"
    (tmp_path / "a.jsonl").write_bytes(line + b"\n" + neighbour)

    assert read(tmp_path / "a.jsonl").texts == [b"a"]


@pytest.mark.parametrize(
    ("message", "text", "place", "problem"),
    [
        ("Expecting value", "[1, \r ]", 6, "a value or name is missing after character 2"),
        (
            "Illegal trailing comma before end of array",
            "[1, \r ]",
            2,
            "a value or name is missing after character 2",
        ),
        (
            "Expecting property name enclosed in double quotes",
            '{"a": 1 ,}',
            9,
            "a value or name is missing after character 7",
        ),
        (
            "Illegal trailing comma before end of object",
            '{"a": 1 ,}',
            8,
            "a value or name is missing after character 7",
        ),
        ("Unterminated string starting at", '{"a', 1, "a string is not closed after character 1"),
    ],
)
def test_a_problem_is_described_alike_by_every_version_of_python(message, text, place, problem):
    assert json_problem(json.JSONDecodeError(message, text, place)) == problem


def test_every_error_of_this_python_has_a_description():
    for text in (
        "",
        "{",
        "[1",
        '{"a"',
        '{"a" 1}',
        '"a',
        '"\t"',
        '"\\x"',
        '"\\u00"',
        "1 2",
        "\ufeff1",
        "[1,]",
    ):
        with pytest.raises(json.JSONDecodeError) as caught:
            json.loads(text)
        assert json_problem(caught.value)
