"""Forked processes look like fresh ones: arguments, streams, directory, environment, exit code."""

import os
import signal
import subprocess
import sys

import pytest
import zygote

PROGRAMS = {
    "arguments and input": (
        "-c",
        "import os, sys; print(sys.argv, sys.path[0], sys.stdin.read(), os.getcwd())",
        "a b",
        "1",
    ),
    "environment": ("-c", "import os; print(sorted(os.environ.items()))"),
    "exit code": ("-c", "import sys; print('out'); sys.exit(3)"),
    "exit with a message": ("-c", "import sys; sys.exit('message')"),
    "exception": ("-c", "raise ValueError('bad')"),
    "interrupt": ("-c", "raise KeyboardInterrupt"),
    "killed": ("-c", "import os; os.kill(os.getpid(), 9)"),
    "end of the program": (
        "-c",
        "import atexit, threading, time; atexit.register(print, 'last');"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()",
    ),
    "warnings": ("-W", "error", "-c", "import warnings; warnings.warn('careful')"),
    "module": ("-m", "json.tool", "--help"),
    "main": ("-c", "print(__name__, globals().get('__file__'))"),
}


def last_line(text):
    return text.splitlines()[-1:]  # without the frames of a traceback


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fork_does_what_a_fresh_interpreter_does(name, tmp_path):
    environment = {**os.environ, "SOME": "value", "COLUMNS": "80"}
    options = {"cwd": tmp_path, "env": environment, "input": "typed"}
    options |= {"capture_output": True, "text": True, "timeout": 240}
    found = zygote.run(PROGRAMS[name], **options)
    expected = subprocess.run([sys.executable, *PROGRAMS[name]], **options)

    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert last_line(found.stderr) == last_line(expected.stderr)


def test_a_script_has_its_name_and_its_directory(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, __file__, sys.argv, sys.path[0])")
    options = {"capture_output": True, "text": True, "timeout": 240}
    found = zygote.run([script, "word"], **options)
    expected = subprocess.run([sys.executable, script, "word"], **options)

    assert found.stdout == expected.stdout


def test_a_running_process_is_polled_waited_for_and_signalled():
    code = "import time; print('ready', flush=True); time.sleep(600)"
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with zygote.Popen(["-c", code], **options) as running:
        assert running.stdout.readline() == "ready\n"
        assert running.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.01)
        assert os.getpgid(running.pid) == running.pid
        os.killpg(running.pid, signal.SIGTERM)
        assert running.wait(60) == running.poll() == -signal.SIGTERM
    running.kill()  # nothing happens


def test_processes_run_at_the_same_time_and_check_raises():
    code = "import sys; print(sys.stdin.readline().upper())"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [zygote.Popen(["-c", code], **streams) for _ in range(2)]

    assert [each.communicate(word, 60)[0] for each, word in zip(both, "ab", strict=True)] == [
        "A\n",
        "B\n",
    ]
    with pytest.raises(subprocess.CalledProcessError):
        zygote.run(["-c", "raise SystemExit(1)"], check=True)
