"""`penstock merge`: one store of several, or the reason why not."""

import penstock as ps
from penstock.sources.settings import Texts


def test_stores_are_merged_and_counted(tmp_path, invoke, run_json):
    for name in "abc":
        ps.build(Texts([f"one {name}", f"two {name}"]), name, tokenizer="bytes")

    done = invoke("merge", "a", "b", "c", "-o", "merged").stdout

    assert done.startswith("merged merged from 3 stores: 3 parts, 6 documents, 36 tokens (")
    assert "is intact" in invoke("verify", "merged").stdout
    found = run_json("merge", "a", "b", "c", "-o", "merged")
    assert (found["path"], found["num_documents"]) == ("merged", 6)
    assert found["digest"] == ps.TokenStore("merged").digest


def test_the_field_that_differs_is_named(tmp_path, invoke):
    ps.build(Texts(["one"]), "a", tokenizer="bytes")
    ps.build(Texts(["two"]), "b", tokenizer="bytes", eos=False)

    assert "eos_id: 256 -> None" in invoke("merge", "a", "b", "-o", "merged", code=1).stderr
    assert "at least two stores" in invoke("merge", "a", "-o", "merged", code=1).stderr


def test_stores_in_object_storage_are_refused_with_a_way_to_merge_them(tmp_path, invoke):
    for name in "ab":
        ps.build(Texts([f"one {name}"]), name, tokenizer="bytes")

    shown = invoke("merge", "s3://bucket/a", "b", "-o", "merged", code=1).stderr
    assert "s3://bucket/a is a URL, and this needs a directory" in shown
    shown = invoke("merge", "a", "b", "-o", "https://me:word@host/x?sig=1", code=1).stderr
    assert "https://host/x is a URL, and this needs a directory" in shown
    assert "penstock copy" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
