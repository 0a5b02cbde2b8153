"""`penstock report` on the command line."""

import numpy as np
import pytest

import penstock as ps


@pytest.fixture
def store(tmp_path):
    return ps.build(ps.Texts(["one two", "three"]), tmp_path / "store", tokenizer="bytes")


def test_a_report_is_written_and_its_path_is_printed(invoke, store, tmp_path):
    shown = invoke("report", "store", "-o", "pages/new.html").stdout

    assert shown.startswith("wrote pages/new.html, ")
    page = (tmp_path / "pages" / "new.html").read_text(encoding="utf-8")
    assert "<h1><bdi>store</bdi></h1>" in page


def test_with_json_the_report_is_one_object(run_json, store, tmp_path):
    found = run_json("report", "store")

    assert found == {"report": "report.html", "bytes": (tmp_path / "report.html").stat().st_size}


def test_token_files_without_a_header_are_reported_with_their_options(invoke, tmp_path):
    np.arange(900, dtype=np.uint16).tofile(tmp_path / "train.bin")
    invoke("report", "train.bin", "--format", "nanogpt", "--vocab-size", "1000")

    assert "<dd>900</dd>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_setting_of_a_recipe_is_refused_for_a_store(invoke, store):
    found = invoke("report", "store", "--set", "training.steps=1", code=2)

    assert "store is not a recipe or a run" in " ".join(found.stderr.replace("│", "").split())


def test_a_source_that_does_not_exist_is_named(invoke):
    found = invoke("report", "nothing", code=1)

    assert "MissingStoreError" in found.stderr
    assert "nothing" in found.stderr
