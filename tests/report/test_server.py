"""The server answers one reader on this machine, and nobody else."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress

import pytest

from penstock.errors import MissingStoreError
from penstock.inspect import inspect_step, open_run
from penstock.report import ReportServer, open_subject


@pytest.fixture(scope="module")
def server(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with ReportServer("run", lambda: open_subject("run")) as server:
            server.open()
            yield server


def ask(server, path, *, host=None, method="GET"):
    """The status, the headers and the body of an answer; the path is sent as it is."""
    address = server.url.removeprefix("http://").strip("/")
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", address if host is None else host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def test_a_step_is_the_one_that_the_run_has_read(server, here):
    run = open_run("run")
    for step in (1, 5):
        rows = inspect_step(run.plan, run.steps, step).rows
        for number, row in enumerate(rows):
            status, _, body = ask(server, f"/steps/{step}/{number}")
            found = json.loads(body)
            assert status == 200
            assert found["num_rows"] == len(rows)
            assert found["row"]["ids"] == row.tokens


def test_any_document_of_any_store_is_served(server, here):
    stores = list(open_subject("run").corpora.values())
    for corpus, number in ((0, 0), (0, 149), (1, 79)):
        status, _, body = ask(server, f"/documents/{corpus}/{number}/0")
        assert status == 200
        assert json.loads(body)["row"]["ids"] == stores[corpus][number].tolist()


@pytest.mark.parametrize(
    "path",
    [
        "/steps/6/0",
        "/steps/0/0",
        "/steps/1/4",
        "/steps/-1/0",
        "/steps/1",
        "/steps/%31%2e0/0",
        "/steps/%D9%A1/0",  # a digit, but not one of ours
        "/steps/" + "9" * 30 + "/0",
        "/documents/0/150/0",
        "/documents/2/0/0",
        "/documents/0/-1/0",
        "/sections/nope",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/run.toml",
        "//example.com/",
        "/favicon.ico",
        "http://example.com/",
    ],
)
def test_a_path_that_does_not_exist_is_refused_and_never_a_file(server, path):
    status, headers, body = ask(server, path)

    if path == "http://example.com/":
        assert status == 200  # the form of a proxy: the page, without data
        return
    assert status == 404
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body)["error"]


@pytest.mark.parametrize(
    "host", ["example.com", "example.com:{port}", "127.0.0.1", "127.0.0.1.example.com:{port}", ""]
)
def test_a_request_for_another_host_is_refused(server, host):
    port = server.url.rpartition(":")[2].strip("/")
    for path in ("/", "/steps/1/0", "/sections"):
        status, _, body = ask(server, path, host=host.format(port=port))
        assert status == 403
        assert b"127.0.0.1 only" in body


def test_a_server_is_shown_with_its_address(server):
    assert repr(server) == f"ReportServer('run': {server.url})"


def test_localhost_is_this_machine(server):
    port = server.url.rpartition(":")[2].strip("/")

    assert ask(server, "/", host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_only_get_is_answered(server, method):
    assert ask(server, "/steps/1/0", method=method)[0] == 501


def test_every_answer_forbids_other_pages_to_use_it(server):
    for path in ("/", "/sections", "/sections/corpus", "/nope"):
        headers = ask(server, path)[1]
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Content-Type-Options"] == "nosniff"
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy
        assert "Access-Control-Allow-Origin" not in headers


def test_the_server_answers_before_its_data_is_open(folder):
    may_open = threading.Event()

    def opened():
        assert may_open.wait(60)
        return open_subject(folder / "run/stores/<b>web")

    with ReportServer("slow", opened) as server:
        opening = threading.Thread(target=server.open)
        opening.start()
        assert b"Opening slow" in ask(server, "/")[2]
        may_open.set()
        names = [each["name"] for each in json.loads(ask(server, "/sections")[2])]
        opening.join(60)
    assert names == ["corpus", "documents"]


def test_data_that_cannot_be_opened_ends_the_server_with_its_error(tmp_path):
    answers = []

    def wait_for_sections(server):
        with suppress(ConnectionError):  # the server ended before it saw the request
            answers.append(ask(server, "/sections")[0])

    def serve():
        with ReportServer("x", lambda: open_subject(tmp_path / "nothing")) as server:
            waiting = threading.Thread(target=wait_for_sections, args=[server], daemon=True)
            waiting.start()
            server.wait()

    with pytest.raises(MissingStoreError, match="nothing"):
        serve()
    assert set(answers) <= {503}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for a single process")
def test_ctrl_c_ends_the_command_without_a_traceback(folder):
    command = [sys.executable, "-m", "penstock", "serve", "run/stores/<b>web"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, text=True, **pipes) as running:
        line = running.stdout.readline()
        port = re.fullmatch(r"open http://127\.0\.0\.1:(\d+)/ in a browser.*\n", line)[1]
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        connection.request("GET", "/sections")  # answered when the store is open
        assert connection.getresponse().status == 200
        running.send_signal(signal.SIGINT)
        shown, errors = running.communicate(timeout=60)

    assert (running.returncode, shown, errors) == (0, "the server has ended\n", "")
