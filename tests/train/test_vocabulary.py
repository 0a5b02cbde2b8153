"""Token ids that the model does not have end a run with an error that names them."""

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError, TrainError
from penstock.train import loaders
from penstock.train.command import choose_recipe, run_recipe
from penstock.train.vocabulary import check_tokens

SMALL = {"training.steps": 1, "training.global_batch_size": 64, "training.batch_size": 64}
SMALL |= {"model.layers": 1, "model.heads": 1, "model.width": 8, "data.length": 16}


def write(path, ids):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + np.asarray(ids, "<u2").tobytes())


def train(path, output, **settings):
    settings = {**SMALL, "output": str(output), **settings}
    recipe = choose_recipe(str(path), settings, "cpu", lambda _: None)
    return run_recipe(recipe, device="cpu", log=lambda _: None)


@pytest.mark.parametrize("given", [{}, {"data.tokens.vocab_size": 50_257}])
def test_every_file_of_a_set_is_compared_with_the_model(tmp_path, given):
    ids = np.ones(2_000_000, int)
    ids[40_000:41_000] = 60_000  # between the blocks that are checked when a file is opened
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train_1.bin", np.ones(200))
    write(tmp_path / "set" / "train_2.bin", ids)

    with pytest.raises(PlanError, match=r"set has token ids up to 60,000.*vocab_size to 60001"):
        train(tmp_path / "set", tmp_path / "run", **given)


def test_an_id_that_no_sample_shows_ends_the_run_before_the_step(tmp_path):
    ids = np.ones(18_000_000, "<u2")
    ids[16_910_000:17_960_000] = 60_000
    write(tmp_path / "train.bin", ids)

    with pytest.raises(TrainError, match=r"the token id 60,000, but the vocabulary .* 50,257 ids"):
        train(tmp_path / "train.bin", tmp_path / "run", **{"data.seed": 1})


def test_ids_of_validation_rows_are_checked_unless_a_store_holds_them(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(100))
    rows = ps.Windows(tmp_path / "ids.npy", 9)

    def read(vocab_size):
        loader = ps.Loader(rows, batch_size=2, shuffle="none", epochs=1, drop_last=False)
        return [*loaders.evaluation_microbatches(loader, 2, vocab_size)]

    assert len(read(100)) == 6
    with pytest.raises(TrainError, match="the token id 54, but the vocabulary of the model has 50"):
        read(50)


def test_an_id_beyond_the_model_names_the_files_and_the_whole_command_to_check_them(tmp_path):
    for number in range(5):
        np.save(tmp_path / f"{number}.npy", np.arange(100))
    stream = [ps.open_tokens(tmp_path / f"{number}.npy") for number in range(5)]

    for count, files in ((1, r"0\.npy"), (5, r"0\.npy, .*1\.npy, .*2\.npy and 2 more")):
        advice = rf"Check \S+{files} with penstock verify PATH --vocab-size 50, or"
        with pytest.raises(TrainError, match=advice):
            check_tokens(0, 54, 50, ps.Plan(ps.Windows(stream[:count], 9)))
