"""Documents that are long in all the ways that break tokenizers and readers."""

import pytest

import penstock

ODD = ["a", "^", " ", "1", "é", "ab", "\n"]


@pytest.mark.slow
def test_a_million_times_the_same_takes_no_quadratic_time(gpt2, tmp_path):
    texts = [piece * 400_000 + "x" for piece in ODD]
    store = penstock.build(penstock.Texts(texts), tmp_path / "store", tokenizer=gpt2)

    assert [store.decode(number) for number in range(len(store))] == texts


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_a_line_of_a_quarter_gigabyte_is_one_document(tmp_path, python, figure):
    path = tmp_path / "a.txt"
    with path.open("wb") as stream:
        for _ in range(256):
            stream.write(b"some words, " * (1 << 20 >> 4) + b"\t" * (1 << 18))
        stream.write(b"\nlast\n")
    code = """
import resource, sys, penstock
store = penstock.build(sys.argv[1], sys.argv[2], tokenizer="bytes", documents="lines")
assert len(store) == 2 and len(store.document(0)) == (256 << 20) + 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
    megabytes = int(python(code, path, tmp_path / "store", timeout=500).stdout)

    figure(f"a line of 256 MiB read in {megabytes:,} MB")
