"""Files of a run that are links: nothing elsewhere is written, and pipes do not block."""

import os

import pytest

from penstock.errors import StoreError, TrainError
from penstock.loader.dataloader import log_fingerprints
from penstock.tokenize.tokenizer import load_tokenizer
from penstock.train.checkpoint import Checkpoints
from penstock.train.config import ModelConfig
from penstock.train.logs import JsonLines, read_metrics

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no named pipes on this system")


@pytest.fixture
def precious(tmp_path):
    """A file of the user."""
    path = tmp_path / "home" / "precious.txt"
    path.parent.mkdir()
    path.write_text("not to be lost")
    yield path
    assert path.read_text() == "not to be lost"
    assert [each.name for each in path.parent.iterdir()] == ["precious.txt"]


def test_metrics_replace_a_link_and_do_not_follow_it(tmp_path, precious):
    (tmp_path / "metrics.jsonl").symlink_to(precious)
    metrics = JsonLines(tmp_path / "metrics.jsonl", [])
    metrics.log("step", 1, {"loss": 2.0})
    metrics.close()

    assert not (tmp_path / "metrics.jsonl").is_symlink()
    assert [each["loss"] for each in read_metrics(tmp_path / "metrics.jsonl")] == [2.0]


def test_checkpoints_are_not_written_into_a_directory_that_is_a_link(tmp_path, precious):
    (tmp_path / "checkpoints").symlink_to(precious.parent)
    with pytest.raises(StoreError, match=r"checkpoints is a link to .*Delete the link"):
        Checkpoints(tmp_path / "checkpoints", keep_last=1).save(1, {})


def test_a_checkpoint_that_is_a_link_is_replaced(tmp_path, precious):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000001.pt").symlink_to(precious)
    Checkpoints(tmp_path / "checkpoints", keep_last=1).save(1, {})
    assert not (tmp_path / "checkpoints" / "step-00000001.pt").is_symlink()


def test_a_pipe_in_place_of_a_checkpoint_is_an_error_and_not_a_wait(tmp_path):
    os.mkfifo(tmp_path / "step-00000001.pt")
    with pytest.raises(TrainError, match="is not a regular file"):
        Checkpoints(tmp_path, keep_last=1).load(ModelConfig())


def test_a_log_of_fingerprints_is_not_appended_to_through_a_link(tmp_path, precious):
    class OneBatch:
        step, position, fingerprint = 1, 8, 7

        def __iter__(self):
            yield {}

    (tmp_path / "log").symlink_to(precious)
    with pytest.raises(StoreError, match=r"log is a link to .*Delete the link"):
        list(log_fingerprints(OneBatch(), tmp_path / "log"))


def test_a_saved_tokenizer_replaces_a_link(tmp_path, precious):
    (tmp_path / "saved").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "saved" / name).symlink_to(precious)
    load_tokenizer("gpt2").save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").digest == load_tokenizer("gpt2").digest
