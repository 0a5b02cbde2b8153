"""The run that ends `penstock demo`."""

from penstock.train.demo import demo_run


def test_it_ends_in_time_with_a_picture(store, tmp_path):
    told = []
    outcome = demo_run(store, tmp_path / "run", val=store, seconds=1.5, tell=told.append)

    assert outcome.finished
    assert outcome.now.seconds < 10
    assert outcome.now.val_loss < 5
    assert "<svg" in (tmp_path / "run" / "curve.svg").read_text()
