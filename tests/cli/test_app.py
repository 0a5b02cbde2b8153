"""Exit codes, error messages, and what `--help` imports."""

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import penstock
from penstock.cli.app import app
from penstock.cli.build import build_command

NAMES = [command.name for command in app.registered_commands]
COMMANDS = [(), *((name,) for name in NAMES), ("tokenizer", "train")]


def test_the_version_is_that_of_the_package(invoke):
    assert invoke("--version").stdout == f"penstock {penstock.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_of_eighty_columns(invoke, command):
    shown = invoke(*command, "--help").stdout

    assert "--help" in shown
    assert max(map(len, shown.splitlines())) <= 80


def run(*arguments):
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=240).stdout


def test_help_imports_nothing_heavy(python):
    """Imports are nearly all of its time: 0.15 s without these packages, over 2 s with torch."""
    code = (
        "import sys\nfrom penstock.cli.app import app\n"
        "try:\n app(['--help'])\nexcept SystemExit:\n pass\n"
        "print(*sorted(name for name in sys.modules if name.startswith('penstock.')))\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'tokenizers', 'gigatoken', 'rich.console'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    *_, ours, heavy = python(code).stdout.splitlines()
    parts = {name.split(".")[1] for name in ours.split()}

    assert heavy == "[]"
    # Of `formats`, their names alone.
    assert parts == {"cli", "errors", "exports", "formats", "options", "paths"}


def test_it_runs_as_a_module():
    assert run("--version").startswith(b"penstock ")


def test_the_console_script_is_the_same_program():
    script = Path(sys.executable).with_name("penstock")
    if not script.exists():
        pytest.skip("the package is not installed with its script")

    assert subprocess.run([script, "--version"], capture_output=True, check=True).stdout


def test_an_error_is_a_name_and_a_message_without_a_traceback(penstock):
    done = penstock("info", "nowhere", check=False)

    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr == b"MissingStoreError: nowhere does not exist, so there is no store.\n"


def test_an_error_as_json_is_one_object_on_stdout(penstock):
    done = penstock("info", "nowhere", "--json", check=False)

    assert done.returncode == 1
    assert done.stderr == b""
    message = "nowhere does not exist, so there is no store."
    assert json.loads(done.stdout) == {"error": {"type": "MissingStoreError", "message": message}}


def test_an_error_of_the_system_has_no_traceback(invoke, corpus):
    blocked = corpus.parent / ("long" * 100)  # longer than names can be

    result = invoke(
        "build", corpus, "--documents", "lines", "-o", blocked, "--tokenizer", "bytes", code=1
    )

    assert result.stderr.startswith("OSError: ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["build", "x", "-o", "y", "--format", "xlsx"],
            ["auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"],
        ),
        (["build", "x", "-o", "y", "--errors", "ignore"], ["strict", "replace"]),
        (["build", "x", "-o", "y", "--special-tokens", "drop"], ["text", "parse"]),
        (["build", "x"], ["--output"]),
        (["decode"], ["STORE"]),
        (["buidl"], ["build"]),
    ],
)
def test_a_usage_error_names_the_choices(invoke, arguments, words):
    result = invoke(*arguments, code=2)

    assert not result.stdout
    assert all(word in result.stderr for word in words)


def test_a_usage_error_is_json_with_json(run_json):
    error = run_json("build", "x", "-o", "y", "--format", "xlsx", code=2)["error"]

    assert error["type"] == "UsageError"
    assert "'parquet'" in error["message"]


def test_errors_show_no_escape_sequence(invoke):
    result = invoke("info", "evil\x1b[31m\u202e", code=1)

    assert result.stderr.isascii()
    assert r"evil\x1b[31m\u202e matches no file" in result.stderr


def test_build_mirrors_the_library_keyword_for_keyword():
    library = inspect.signature(penstock.build).parameters
    command = inspect.signature(build_command).parameters
    missing = set(library) - set(command)

    assert missing == {"progress"}
    for name, parameter in library.items():
        if name not in ("inputs", "store", "progress"):
            assert command[name].default == parameter.default, name


def test_a_closed_pipe_is_not_an_error(corpus):
    """`penstock … | head -1` closes the pipe early."""
    code = f"{sys.executable} -m penstock --help | true; exit ${{PIPESTATUS[0]}}"

    done = subprocess.run(["bash", "-c", code], capture_output=True, timeout=240, check=False)

    assert (done.returncode, done.stderr) == (0, b"")


def test_a_command_that_prints_while_it_works_does_not_claim_success_into_a_closed_pipe(tmp_path):
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    train = f"{sys.executable} -m penstock train a.txt --steps 1 --max_length 8"
    code = f"{train} | true; exit ${{PIPESTATUS[0]}}"

    done = subprocess.run(
        ["bash", "-c", code], cwd=tmp_path, capture_output=True, timeout=240, check=False
    )

    assert (done.returncode, done.stderr) == (1, b"")


def test_shell_completion_can_be_installed(tmp_path):
    def penstock(*arguments, **environment):
        # Typer looks for a shell among the processes around it, unless this variable is set.
        command = [sys.executable, "-m", "penstock", *arguments]
        named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
        environment = {**os.environ, **named, **environment}
        return subprocess.run(command, env=environment, capture_output=True, check=True)

    done = penstock("--install-completion", "bash", HOME=str(tmp_path))
    script = tmp_path / ".bash_completions" / "penstock.sh"
    asked = {"COMP_WORDS": "penstock in", "COMP_CWORD": "1", "_PENSTOCK_COMPLETE": "complete_bash"}

    assert "penstock.sh" in done.stdout.decode()
    assert "complete -o default -F _penstock_completion penstock" in script.read_text()
    assert penstock(**asked).stdout.split() == [b"info", b"inspect"]


def shell(command, directory):
    code = command.replace("penstock", f"{sys.executable} -m penstock", 1)
    return subprocess.run(
        ["bash", "-c", code], cwd=directory, capture_output=True, timeout=240, check=False
    )


@pytest.mark.skipif(os.name == "nt", reason="the shell of Windows is another")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_the_caller_closed_is_ignored(corpus, tmp_path, closed):
    build = f"penstock build {corpus} -o store --tokenizer bytes"
    for command in (
        build,
        "penstock info store",
        "penstock info store --json",
        "penstock --version",
    ):
        done = shell(f"{command} {closed}", tmp_path)

        assert (done.returncode, done.stderr) == (0, b""), command


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("penstock info store --json", 1, b"OSError: [Errno 28] No space left on device\n"),
        ("penstock info store", 1, b"OSError: [Errno 28] No space left on device\n"),
        ("penstock --version", 1, b"OSError: [Errno 28] No space left on device\n"),
        (
            "penstock info no --json",
            1,
            b"MissingStoreError: no does not exist, so there is no store.\n",
        ),
        ("penstock info --json", 2, b"UsageError: Missing argument 'STORE'.\n"),
    ],
)
def test_a_full_disk_under_stdout_is_one_line_on_stderr(corpus, tmp_path, command, code, message):
    penstock.build(str(corpus), tmp_path / "store", tokenizer="bytes", documents="lines")
    done = shell(f"{command} > /dev/full", tmp_path)

    assert (done.returncode, done.stderr) == (code, message)


def test_a_terminal_without_unicode_gets_escapes(penstock, corpus):
    penstock("build", corpus, "--documents", "lines", "-o", "store", "--tokenizer", "bytes")

    shown = penstock("info", "store", PYTHONIOENCODING="ascii", PYTHONUTF8="0").stdout

    assert shown.isascii()
    assert b"documents" in shown


def test_every_command_is_documented_by_its_function():
    group = typer.main.get_command(app)

    assert all(command.help for command in group.commands.values())


@pytest.mark.skipif(os.name == "nt", reason="signals of Windows are others")
def test_ctrl_c_before_any_work_is_one_line():
    code = (
        "import os, signal, sys\n"
        "class Stop:\n"
        " def find_spec(self, name, path=None, target=None):\n"
        "  if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from penstock.cli import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=240, check=False
    )

    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == b"Interrupted: stopped by Ctrl-C.\n"


def test_no_metavar_is_the_name_of_its_parameter():
    """Typer 0.27 would call the option --SECONDS instead of --seconds."""

    def parameters(command):
        yield from command.params
        for each in getattr(command, "commands", {}).values():
            yield from parameters(each)

    found = list(parameters(typer.main.get_command(app)))

    assert len(found) > 50
    unnamed = [each for each in found if each.opts == [f"--{each.name}"]]
    assert len(unnamed) > 10
    assert not [each.name for each in unnamed if (each.metavar or "").lower() == each.name]
