"""The loops train, and resume where they stopped: the same losses as without the stop."""

import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest
import zygote
from torch_version import needs_fsdp

EXAMPLES = Path(__file__).parents[2] / "examples"
WHOLE, STOP = 3, 1
NEEDS = {"lightning": "lightning", "trainer": "transformers", "accelerate": "accelerate"}
NEEDS["sft_trainer"] = "trl"


def losses(text):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", text)}


@pytest.fixture
def text(tmp_path):
    lines = (f"Line {number}: the quick brown fox jumps.\n" for number in range(200))
    (tmp_path / "input.txt").write_text("".join(lines))
    return ("input.txt", "--tokenizer", "bytes")


@pytest.fixture
def chats(tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 50)
    return ("chats.jsonl",)


@pytest.mark.filterwarnings("default")  # of Lightning and transformers
@pytest.mark.parametrize("kind", ["", "accelerate", "trainer", "lightning", "sft_trainer"])
def test_a_loop_that_was_stopped_resumes_exactly(kind, request, run_here):
    pytest.importorskip(NEEDS.get(kind, "torch"), reason="an example needs it")
    given = request.getfixturevalue("chats" if kind == "sft_trainer" else "text")
    script = EXAMPLES / ("loop.py" if not kind else f"loop_{kind}.py")

    def run(out, steps):
        return losses(run_here(script, *given, "--out", out, "--steps", steps).stdout)

    whole = run("whole", WHOLE)
    before, after = run("stopped", STOP), run("stopped", WHOLE)

    assert list(whole) == [1, 2, 3]
    assert [*before, *after] == [1, 2, 3]
    assert before | after == whole
    assert whole[3] < whole[1]


def start_rank(rank, world_size, port, arguments, directory):
    """Start the example as torchrun would."""
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    settings |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
    return zygote.Popen(
        [EXAMPLES / "loop_fsdp2.py", *arguments],
        cwd=directory,
        env={**os.environ, **{name: str(value) for name, value in settings.items()}},
        stdout=subprocess.PIPE,
        text=True,
    )


@needs_fsdp
def test_the_loop_of_fsdp2_resumes_on_another_number_of_ranks(tmp_path, text):
    def run(out, steps, world_size):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        arguments = [*text, "--out", out, "--steps", str(steps)]
        ranks = [
            start_rank(rank, world_size, port, arguments, tmp_path) for rank in range(world_size)
        ]
        try:
            shown = [each.communicate(timeout=120)[0] for each in ranks]
        finally:
            for each in ranks:
                each.kill()
        assert [each.returncode for each in ranks] == [0] * world_size
        return losses(shown[0])

    whole = run("whole", WHOLE, 1)
    before, after = run("stopped", STOP, 1), run("stopped", WHOLE, 2)

    assert [*before, *after] == [1, 2, 3]
    assert before | after == pytest.approx(whole, abs=2e-4)  # ranks add in another order
