"""The loss curve, the progress line, metrics.jsonl and the sample of text."""

import io
import math
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from penstock.errors import TrainError
from penstock.train import GPT, Display, RunProgress, RunReport
from penstock.train.display import draw_curve, report_line, write_curve
from penstock.train.metrics import peak_flops, peak_memory
from penstock.train.sample import generate

pytestmark = pytest.mark.usefixtures("pictures")


def metrics(num_steps=2_000):
    for step in range(1, num_steps + 1):
        yield {"kind": "step", "step": step, "loss": 10.0 - step / num_steps}
        if step % 500 == 0:
            yield {"kind": "val", "step": step, "val_loss": 9.5 - step / num_steps}


def points(picture, name):
    """The points of a line of the picture, by the name of its series."""
    tree = ElementTree.fromstring(picture)
    lines = [each for each in tree.iter() if each.get("class") == f"series-{name}"]
    paths = [each for line in lines for each in line if each.get("d", "").startswith("M")]
    pairs = re.findall(r"[ML] (\S+) (\S+)", paths[0].get("d")) if paths else []
    return [(float(x), float(y)) for x, y in pairs]


def test_the_picture_shows_both_losses_going_down():
    picture = draw_curve(metrics(), title="a <b> & c", target=8.7)

    train, val = points(picture, "train"), points(picture, "val")
    assert len(train) <= 600
    assert len(val) == 4
    for line in (train, val):
        assert [x for x, _ in line] == sorted(x for x, _ in line)
        assert [y for _, y in line] == sorted(y for _, y in line)  # down is more in pictures
        assert all(0 <= x <= 720 and 0 <= y <= 400 for x, y in line)
    assert "a &lt;b&gt; &amp; c" in picture
    assert "target 8.7" in picture
    assert "lowest 8.5000" in picture


def test_the_picture_shows_the_time_that_steps_waited_for_data():
    waited = [{**each, "waited": 0.002} for each in metrics(20)]

    assert "ms waited" in draw_curve(waited)
    assert "ms waited" not in draw_curve(metrics(20))


def test_a_run_without_matplotlib_has_no_picture_and_says_how_to_get_it(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_curve(tmp_path / "curve.svg", metrics(), title="a", target=None, log=logged.append)

    assert not (tmp_path / "curve.svg").exists()
    (line,) = logged
    assert line.startswith("curve.svg was not written. Charts need matplotlib")
    assert 'pip install "penstock[report]"' in line


def test_a_run_of_nothing_and_losses_that_are_no_numbers_are_drawn_too():
    assert points(draw_curve([]), "train") == []
    wild = [{"kind": "step", "step": 1, "loss": float("nan")}]
    assert points(draw_curve(wild), "train") == []


def report(**changes):
    now = RunProgress(step=1_200, steps=4_800, loss=5.31214, val_loss=5.441)
    logged = {
        "learning_rate": 0.00283,
        "tokens_per_second": 6210.4,
        "mfu": 0.412,
        "data_wait": 0.001,
        "seconds_left": 588.0,
    }
    return RunReport(progress=now, peak_memory=1_200_000_000, **{**logged, **changes})


def test_a_report_is_one_line():
    assert report_line(report()) == (
        "step 1,200/4,800  loss 5.3121  val 5.4410  lr 0.0028  6,210 tok/s  ETA 9:48  MFU 41.2%  "
        "wait 0.1%  1.2 GB"
    )
    assert "MFU" not in report_line(report(mfu=None))


def test_the_first_step_has_no_speed():
    first = report(tokens_per_second=0.0, mfu=0.0, seconds_left=math.inf)
    assert "lr 0.0028  wait 0.1%  1.2 GB" in report_line(first)


def test_without_a_terminal_lines_come_now_and_then():
    stream = io.StringIO()
    display = Display(stream)
    for _ in range(50):
        display(report())
    display("a remark")
    display.close()

    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1] == "a remark"


def test_what_a_model_writes_cannot_command_the_terminal():
    stream = io.StringIO()
    Display(stream)("red \x1b[31m\u202e\nnext")

    assert stream.getvalue() == "red \\x1b[31m\\u202e\nnext\n"


def test_in_a_terminal_the_last_line_is_drawn_anew():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    display = Display(stream)
    display(report())
    display("a [bold] remark")
    display.close()

    assert "a [bold] remark" in stream.getvalue()
    assert "loss 5.3121" in stream.getvalue()


def test_a_cpu_claims_no_peak():
    assert peak_flops(torch.device("cpu")) is None


def test_memory_is_reported_as_0_where_the_system_does_not_measure_it(monkeypatch):
    assert peak_memory(torch.device("cpu")) > 0
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows

    assert peak_memory(torch.device("cpu")) == 0


def test_a_model_writes_the_same_words_for_the_same_seed(tiny):
    torch.manual_seed(0)
    model = GPT(tiny)
    one, two, three = (generate(model, [7], num_tokens=50, seed=seed) for seed in (1, 1, 2))

    assert one == two != three
    assert len(one) == 51
    assert one[0] == 7
    assert max(one) < 257
    assert model.training
    assert max(generate(model, [7], num_tokens=50, vocab_size=20)) < 20


def test_a_model_without_numbers_writes_nothing(tiny):
    model = GPT(tiny)
    with torch.no_grad():
        model.token_embedding.weight.fill_(float("nan"))

    with pytest.raises(TrainError, match="not finite"):
        generate(model, [7])


def test_a_title_of_any_bytes_is_a_picture_all_the_same():
    drawn = draw_curve([], title="caf\udce9 \x1b[31m <b>")

    assert "caf\ufffd \ufffd[31m &lt;b&gt;" in drawn
    assert ElementTree.fromstring(drawn.encode()).tag.endswith("svg")
