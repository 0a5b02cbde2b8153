"""The lines of a manifest that list its parts, read in bulk: as the JSON parser reads them."""

import random

import pytest

import penstock
from penstock.sources.settings import Texts
from penstock.store.manifest import _parsed, manifest_bytes, read_manifest
from penstock.store.part_lines import parse_lines
from penstock.store.part_table import ALL_KINDS, KINDS, PartRecord, PartTable, file_sizes


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """What a manifest says beside its parts."""
    store = penstock.build(Texts(["some text"]), tmp_path_factory.mktemp("a"), tokenizer="bytes")
    return {key: value for key, value in store.manifest.contents.items() if key != "digest"}


def made_parts(generator, number):
    """Records with numbers of all lengths, and with all combinations of files."""
    parts, last = [], -1
    for _ in range(number):
        last += generator.choice([1, 1, 1, 7])
        documents = generator.randrange(10 ** generator.randint(1, 6))
        tokens = generator.randrange(10 ** generator.randint(1, 9))
        has = {kind: int(kind in KINDS or generator.random() < 0.8) for kind in ALL_KINDS}
        sizes = file_sizes(documents, tokens, 2, has)
        files = {
            kind: (sizes[kind], f"{generator.getrandbits(256):064x}")
            for kind in ALL_KINDS
            if has[kind]
        }
        continued = generator.choice([0, 0, min(1, documents)])
        parts.append(PartRecord(last, documents, tokens, files, continued))
    return parts


def test_parts_of_few_forms_are_read_as_the_parser_of_json_reads_them(contents, tmp_path):
    for seed in range(40):
        parts = made_parts(random.Random(seed), 1 + seed % 40)
        data = manifest_bytes(contents, parts)

        found = parse_lines(data)

        known, records = _parsed(data, tmp_path)
        assert found is not None
        assert isinstance(found[1], PartTable)
        assert list(found[1]) == list(records) == parts
        assert found[0] == known


def test_a_changed_byte_is_never_read_in_another_way_than_by_the_parser_of_json(contents, tmp_path):
    accepted = 0
    for seed in range(1000):
        generator = random.Random(seed)
        data = bytearray(manifest_bytes(contents, made_parts(generator, 3)))
        at = generator.randrange(data.index(b'"parts"') - 4, len(data))
        kind = generator.random()
        if kind < 0.3:
            del data[at]
        elif kind < 0.6:
            data.insert(at, generator.choice(b'0123456789 ,:"\n{}[]aA_-.eE'))
        else:
            data[at] = generator.choice(b'0123456789 ,:"\n{}[]aA_-.eE')
        found = parse_lines(bytes(data))
        if found is not None:
            accepted += 1
            known, records = _parsed(bytes(data), tmp_path)
            assert list(found[1]) == list(records)
            assert found[0] == known

    assert accepted > 100  # other digits of a digest, for example


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"part": 1,', b'"part": 01,'),
        (b'"part": 1,', b'"part": 0,'),
        (b'"part": 1,', b'"part": 1.0,'),
        (b'"part": 1,', b'"part":1,'),
        (b'"documents": 7', b'"documents": 8'),
        (b'"origin": [240', b'"origin": [241'),
        (b"ab" * 32, b"AB" * 32),
        (b"ab" * 32, b"00" * 32),
        (b"ab" * 32, b"ab" * 31 + b" a"),
        (b'\n "parts": [', b'\n "parts": [{}], "parts": ['),
        (b'"version": 2', b'"version": 3'),
        (b'"dtype": "uint16"', b'"dtype": "uint64"'),
        (b"\n ]\n}\n", b'\n ], "parts": []\n}\n'),
    ],
)
def test_lines_that_are_not_as_a_build_writes_them_are_left_to_the_parser_of_json(
    contents, old, new
):
    sizes = file_sizes(7, 100, 2, dict.fromkeys(ALL_KINDS, 1))
    files = {kind: (size, "ab" * 32) for kind, size in sizes.items()}
    data = manifest_bytes(
        contents | {"dtype": "uint16"}, [PartRecord(n, 7, 100, files) for n in range(3)]
    )
    assert parse_lines(data) is not None
    assert old in data

    assert parse_lines(data.replace(old, new, 1)) is None


def test_a_manifest_of_many_parts_has_the_same_records(contents, tmp_path):
    parts = made_parts(random.Random(17), 1000)
    counts = {
        "documents": sum(part.num_documents - part.num_continued for part in parts),
        "pieces": sum(part.num_documents for part in parts),
        "tokens": sum(part.num_tokens for part in parts),
    }
    (tmp_path / "penstock.json").write_bytes(manifest_bytes(contents | {"counts": counts}, parts))

    assert list(read_manifest(tmp_path).parts) == parts
