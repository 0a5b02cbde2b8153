"""Text files to flat arrays, and the command that makes them."""

import os
import subprocess
import sys

import numpy as np
import pytest
import zygote

from penstock import load_tokenizer
from penstock.errors import SourceError, StoreError
from penstock.preprocess import main, preprocess

LINES = ["This is the first document.", "This is the second.", "", "And one after a blank line."]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the files where they usually are."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "training_data"
    folder.mkdir()
    (folder / "owt_train.txt").write_text("\n".join(LINES) + "\n")
    (folder / "owt_valid.txt").write_text(LINES[0] + "\n")
    return tmp_path


def expected(lines):
    tokenizer = load_tokenizer("gpt2")
    return [token for line in lines if line for token in (*tokenizer.encode(line), 50256)]


def test_the_array_is_flat_and_read_without_penstock(here):
    count = preprocess("training_data/owt_train.txt", "out/tokens.npy")
    array = np.load("out/tokens.npy", mmap_mode="r")

    assert array.ndim == 1
    assert array.dtype == np.uint16
    assert array.tolist() == expected(LINES)
    assert count == len(array)
    assert [path.name for path in (here / "out").iterdir()] == ["tokens.npy"]


@pytest.mark.parametrize("arguments", [[], ["--preprocess"]])
def test_the_command_writes_both_files_under_their_names(here, capsys, arguments):
    assert main(arguments) == 0

    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(
        "training_data/owt_train.txt -> training_data/owt_train_preprocessed.npy: "
    )
    val = np.load(here / "training_data" / "owt_val_preprocessed.npy", mmap_mode="r")
    assert val.tolist() == expected(LINES[:1])


def test_it_runs_as_a_module_with_files_of_ones_own(here):
    (here / "mine.txt").write_text("mine\n")
    command = ["-m", "penstock.preprocess", "--preprocess"]
    command += ["--train_file", "mine.txt", "--val_file", "mine.txt"]
    command += ["--output_dir", "tokens", "--tokenizer", "bytes"]
    done = zygote.run(command, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stderr
    assert np.load("tokens/owt_train_preprocessed.npy").tolist() == [*b"mine", 256]
    assert np.load("tokens/owt_val_preprocessed.npy").tolist() == [*b"mine", 256]


@pytest.mark.skipif(os.name == "nt", reason="the shell of Windows is another")
@pytest.mark.parametrize(("end", "code"), [("| true", 1), (">&-", 0)])
def test_a_reader_that_leaves_is_no_error_message(here, end, code):
    command = f"set -o pipefail; {sys.executable} -m penstock.preprocess --tokenizer bytes {end}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=240)

    assert (done.returncode, done.stderr) == (code, b"")
    assert (here / "training_data" / "owt_train_preprocessed.npy").exists()


def test_ctrl_c_is_one_line_and_leaves_nothing(here, capsys, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.preprocess.write_file", stopped)

    assert main(["--tokenizer", "bytes", "--output_dir", "out"]) == 130
    assert capsys.readouterr().err == "Interrupted: stopped by Ctrl-C.\n"
    assert list((here / "out").iterdir()) == []


def test_a_missing_file_is_told_without_a_traceback(here, capsys):
    (here / "training_data" / "owt_valid.txt").unlink()

    assert main([]) == 1
    told = capsys.readouterr().err
    assert told.startswith("MissingInputError: training_data/owt_valid.txt does not exist")
    # The other file was not tokenized before this was told.
    assert [path.name for path in (here / "training_data").iterdir()] == ["owt_train.txt"]
    assert f"working directory: {here}" in told
    assert "penstock fetch openwebtext" in told


def test_a_missing_file_that_no_command_makes_is_not_advised_to_be_fetched(here, capsys):
    assert main(["--train_file", "my.txt"]) == 1
    told = capsys.readouterr().err
    assert "my.txt does not exist" in told
    assert told.endswith("Name another file with --train_file and --val_file.\n")


def test_a_file_without_text_is_refused_and_leaves_nothing(here):
    (here / "blank.txt").write_text("\n\n  \n")

    with pytest.raises(SourceError, match="hold no document"):
        preprocess("blank.txt", "out/tokens.npy")
    assert list((here / "out").iterdir()) == []


def test_an_array_with_other_tokens_is_replaced_only_on_request(here):
    preprocess("training_data/owt_train.txt", "tokens.npy")
    preprocess("training_data/owt_train.txt", "tokens.npy")  # the same tokens

    with pytest.raises(StoreError, match=r"tokens.npy exists with other tokens than the 7 of"):
        preprocess("training_data/owt_valid.txt", "tokens.npy")
    assert np.load("tokens.npy").tolist() == expected(LINES)
    preprocess("training_data/owt_valid.txt", "tokens.npy", overwrite=True)

    assert np.load("tokens.npy").tolist() == expected(LINES[:1])


def test_a_directory_is_refused_before_the_text_is_read(here):
    with pytest.raises(StoreError, match=r"training_data is a directory. Name the file to write"):
        preprocess("training_data/owt_train.txt", "training_data")
