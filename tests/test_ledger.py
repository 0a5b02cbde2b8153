"""The ledger: lines are only added, and whatever else happens to them is reported."""

import json
import subprocess
import sys
import threading
from contextlib import suppress
from fractions import Fraction

import pytest

import penstock as ps
from penstock.errors import LedgerError, PenstockError, PlanError
from penstock.ledger import (
    AddedStore,
    LedgerLine,
    amended,
    append_line,
    ledger_path,
    read_ledger,
    write_copy,
)

RUN_LIMITED = """
import resource, signal, sys
from pathlib import Path
from penstock.ledger import LedgerLine, append_line, read_ledger
path = Path(sys.argv[1])
known = read_ledger(path)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20,) * 2)
append_line(path, known, LedgerLine("", 3, {"position": 9}, {}))
"""


@pytest.fixture
def plan(tmp_path):
    for name in ("web", "code", "math"):
        texts = [f"{name} {number} some text" for number in range(60)]
        ps.build(ps.Texts(texts), tmp_path / name, tokenizer="bytes")
    rows = {name: ps.Windows(tmp_path / name, 16) for name in ("web", "code")}
    return ps.Plan(rows, weights={"web": 3, "code": Fraction(1, 3)}, seed=17)


@pytest.fixture
def opens(tmp_path):
    return lambda store: ps.Windows(tmp_path / store.train, 16)


@pytest.fixture
def ledger(plan, opens, tmp_path):
    """A ledger of three lines, and the plan with its amendments."""
    path, lines = tmp_path / "mix.ledger.jsonl", []
    math = opens(AddedStore("math"))
    for options, stores in (
        ({"weights": {"web": Fraction(1, 3), "code": 0.7}}, {}),
        ({"add": {"math": math}, "weights": {"web": 2, "code": 1, "math": 1.0}}, {"math": "math"}),
        ({"drop": ["code"], "skip": 5, "exclude": {"web": [(0, 12)]}}, {}),
    ):
        changed = plan.amend(40 * len(lines) + 8, **options)
        added = {name: AddedStore(store) for name, store in stores.items()}
        line = LedgerLine(plan.digest, 5, changed.amendments[-1].to_json(), added, ["a:0"])
        append_line(path, lines, line)
        lines, plan = [*lines, line], changed
    return path, plan


def test_a_ledger_gives_the_plan_back_with_all_its_amendments(plan, ledger, opens):
    path, changed = ledger
    again = amended(plan, read_ledger(path), opens)

    assert again.digest == changed.digest != plan.digest
    assert again.samples(0, 300) == changed.samples(0, 300)
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [5, 5, 5]


def test_lines_are_only_added(ledger, tmp_path):
    path, _ = ledger
    before, lines = path.read_bytes(), read_ledger(path)
    append_line(path, lines, LedgerLine("", 9, {"position": 900}, {}))
    write_copy(tmp_path / "copy", read_ledger(path))

    assert path.read_bytes().startswith(before)
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()


def test_no_file_is_an_empty_ledger(tmp_path):
    assert read_ledger(ledger_path(tmp_path / "mix.toml")) == ()


def test_every_byte_of_a_ledger_that_is_changed_is_an_error(ledger):
    path, _ = ledger
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(LedgerError, match=r"Line \d of .*mix.ledger.jsonl is not as|cut short"):
            read_ledger(path)


def test_every_line_that_a_crash_cuts_short_is_reported(ledger):
    path, _ = ledger
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for size in range(1, first - 1, 9):
        path.write_bytes(data[:first] + data[first : first + size])
        with pytest.raises(
            LedgerError, match=rf"\({size:,} bytes at byte {first:,}\).*Delete the line, and run"
        ):
            read_ledger(path)


@pytest.mark.parametrize("kept", [(1, 2), (0, 2), (1, 0, 2), (0, 0, 1, 2), (2,)])
def test_lines_that_were_removed_moved_or_repeated_are_an_error(ledger, kept):
    path, _ = ledger
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[number] for number in kept))

    with pytest.raises(LedgerError, match="does not follow the line before it"):
        read_ledger(path)


def test_a_line_of_another_shape_is_an_error(tmp_path):
    from penstock.digest import checked_json

    path = tmp_path / "ledger"
    good = {"plan": "", "step": 1, "amendment": {}, "stores": {}, "documents": [], "before": ""}
    for wrong in (
        {"stores": 5},
        {"stores": {"a": ["x", "y", "z"]}},
        {"amendment": 1},
        {"step": "1"},
    ):
        path.write_bytes(checked_json(good | wrong) + b"\n")
        with pytest.raises(LedgerError, match="Line 1 of"):
            read_ledger(path)


def test_a_ledger_of_another_plan_or_of_a_changed_store_is_refused(plan, ledger, opens, tmp_path):
    path, _ = ledger
    lines = read_ledger(path)
    other = ps.Plan(plan.sources, weights={"web": 3, "code": 1}, seed=17)

    with pytest.raises(LedgerError, match=r"Amendment 1 \(from step 5 on\) belongs to a plan with"):
        amended(other, lines, opens)
    with pytest.raises(LedgerError, match=r"Amendment 2 .* does not fit math: a store was changed"):
        amended(plan, lines, lambda _: ps.Windows(tmp_path / "web", 16))


def test_an_amendment_that_is_no_amendment_is_refused(plan, opens):
    for wrong in (
        {},
        {"position": 8, "weights": {"web": [1]}},
        {"position": 8, "exclude": {"web": 5}},
        {"position": 8, "weights": {"web": True}},
    ):
        with pytest.raises(LedgerError, match="An amendment cannot be read"):
            amended(plan, [LedgerLine(plan.digest, 1, wrong, {})], opens)
    with pytest.raises(PlanError, match="changes nothing"):
        amended(plan, [LedgerLine(plan.digest, 1, {"position": 8}, {})], opens)


def test_odd_values_in_an_amendment_end_in_an_error_of_penstock(plan, ledger, opens):
    path, _ = ledger
    tried = valid = 0
    odd = ["x", 5, -1, 2**80, 1.5, None, True, [], [[1]], {}, {"web": 1}, {"web": [[0, 99999]]}]
    for line in read_ledger(path)[::2]:
        for name in (*line.amendment, "skip", "add"):
            for value in odd:
                wrong = line._replace(plan=plan.digest, amendment=line.amendment | {name: value})
                tried += 1
                # Any other error would end the test. A few of the values are valid.
                with suppress(PenstockError):
                    amended(plan, [wrong], opens)
                    valid += 1
    assert tried - valid > 80
    assert valid


def test_of_two_writers_one_is_refused(ledger):
    path, _ = ledger
    known, refused = read_ledger(path), []

    def write(step):
        try:
            append_line(path, known, LedgerLine("", step, {"position": 900}, {}))
        except LedgerError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=write, args=(step,)) for step in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(refused) == 7
    assert all("was changed by another process. Run this again." in each for each in refused)
    assert len(read_ledger(path)) == len(known) + 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limits of file sizes")
def test_a_full_disk_leaves_the_ledger_as_it_was(ledger):
    path, _ = ledger
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", RUN_LIMITED, str(path)], capture_output=True, text=True, check=False
    )

    assert done.returncode
    assert "OSError" in done.stderr
    assert path.read_bytes() == before
