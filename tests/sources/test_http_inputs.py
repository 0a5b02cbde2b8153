"""Inputs of HTTP servers: every odd answer is a clear error, and no secret is in a message."""

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import getsource
from urllib.parse import urlsplit

import fsspec
import fsspec.implementations.http
import pytest

import penstock
from penstock.errors import SourceError
from penstock.options import ReadSettings
from penstock.sources.listing import list_files

# Longer than a block, so it is read in several requests.
TEXT = b"".join(b"line %d of the file\n" % number for number in range(250_000))
SECRETS = ("hunter2", "s3cr3t")


class Server:
    """One file; `answer` may change the status, the headers and the body of a response."""

    def __init__(self):
        self.data, self.stop = TEXT, threading.Event()
        self.validators = {"ETag": '"one"'}
        self.answer = lambda handler, status, headers, body: (status, headers, body)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                data, wanted = outer.data, self.headers.get("Range")
                status, headers, body = 200, dict(outer.validators), data
                if wanted:
                    first, last = map(int, wanted.removeprefix("bytes=").split("-"))
                    status, body = 206, data[first : last + 1]
                    last = first + len(body) - 1
                    headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                headers["Content-Length"] = str(len(body))
                if urlsplit(self.path).path != "/a.txt":
                    status, headers, body = 404, {"Content-Length": "0"}, b""
                status, headers, body = outer.answer(self, status, headers, body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    with suppress(ConnectionError):  # the client may have seen enough
                        self.wfile.write(body)
                self.close_connection = True

            def do_HEAD(self):
                self.do_GET()

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        self.host = f"127.0.0.1:{self.http.server_address[1]}"
        self.url = f"http://me:hunter2@{self.host}/a.txt?X-Amz-Signature=s3cr3t"


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(fsspec.config, "conf", {"http": {"client_kwargs": {}}})
    server = Server()
    yield server
    server.stop.set()
    server.http.shutdown()
    server.http.server_close()
    server.thread.join(5)
    fsspec.implementations.http.HTTPFileSystem.clear_instance_cache()


def test_a_file_of_a_good_server_is_built_and_no_secret_is_stored(server, tmp_path, caplog):
    store = penstock.build(server.url, tmp_path / "store", tokenizer="bytes", documents="lines")

    assert len(store) == 250_000
    assert store.manifest.inputs[0]["name"] == f"http://{server.host}/a.txt"
    for path in [*tmp_path.glob(".*"), *(tmp_path / "store").iterdir()]:
        data = path.read_bytes() if path.is_file() else b""
        assert not any(secret.encode() in data for secret in SECRETS), path
    assert not any(secret in caplog.text for secret in SECRETS)


def later(start, change):
    """An answer that changes responses to requests of bytes after `start`."""

    def answer(handler, status, headers, body):
        wanted = handler.headers.get("Range", "bytes=0-")
        first = int(wanted.removeprefix("bytes=").split("-")[0])
        if handler.command == "GET" and "Range" in handler.headers and first >= start:
            return change(status, headers, body)
        return status, headers, body

    return answer


ODD = {
    "another range": later(1, lambda s, h, b: (s, h | {"Content-Range": "bytes 0-9/440"}, b)),
    "no range": later(1, lambda s, h, b: (s, h | {"Content-Range": "nonsense"}, b)),
    "the whole file": later(
        1, lambda s, h, b: (200, {"ETag": '"one"', "Content-Length": str(len(TEXT))}, TEXT)
    ),
    "compressed": later(0, lambda s, h, b: (s, h | {"Content-Encoding": "gzip"}, b)),
    "short": later(1, lambda s, h, b: (s, h, b[:-10])),
    "empty range": later(1, lambda s, h, b: (416, {"Content-Length": "0"}, b"")),
    "negative length": later(1, lambda s, h, b: (s, h | {"Content-Length": "-5"}, b)),
    "length of words": later(1, lambda s, h, b: (s, h | {"Content-Length": "many"}, b)),
    "refused": later(1, lambda s, h, b: (403, {"Content-Length": "0"}, b"")),
    "failed": later(1, lambda s, h, b: (500, {"Content-Length": "0"}, b"")),
    "loop": later(1, lambda s, h, b: (302, {"Location": "/a.txt", "Content-Length": "0"}, b"")),
    "file scheme": later(
        1, lambda s, h, b: (302, {"Location": "file:///etc/passwd", "Content-Length": "0"}, b"")
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_answer_is_an_error_without_secrets(server, tmp_path, kind):
    server.answer = ODD[kind]
    with pytest.raises(SourceError, match=r"127\.0\.0\.1:\d+/a\.txt") as caught:
        penstock.build(server.url, tmp_path / "store", tokenizer="bytes", documents="lines")

    error, texts = caught.value, []
    while error is not None:  # the errors that a traceback would show
        texts.append(str(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert not any(secret in text for secret in SECRETS for text in texts), texts
    assert not (tmp_path / "store" / "penstock.json").exists()


@pytest.mark.parametrize(
    ("status", "words"), [(404, "does not exist"), (403, "reached: 403"), (500, "reached: 500")]
)
def test_a_refusal_says_so_and_no_secret(server, status, words):
    server.answer = lambda handler, *_: (status, {"Content-Length": "0"}, b"")
    with pytest.raises(SourceError, match=words) as caught:
        list_files(server.url, ReadSettings())

    assert not any(secret in str(caught.value) for secret in SECRETS)


def test_a_server_without_a_length_or_a_sign_of_change_is_refused(server):
    server.validators = {}
    with pytest.raises(SourceError, match="does not give ETag or Last-Modified"):
        list_files(server.url, ReadSettings())


@pytest.mark.parametrize(
    "change",
    [{"ETag": '"two"'}, {"Last-Modified": "Tue, 02 Jan 2024 00:00:00 GMT"}],
    ids=lambda change: next(iter(change)),
)
def test_a_file_that_is_replaced_between_two_requests_is_refused(server, tmp_path, change):
    (name,) = change
    if name not in getsource(fsspec.implementations.http):
        pytest.skip(f"fsspec {fsspec.__version__} does not read {name}")
    server.validators = {name: "Mon, 01 Jan 2024 00:00:00 GMT"}

    def replace(status, headers, body):
        server.validators = change
        server.data = TEXT.replace(b"line", b"LINE")
        return status, headers, body

    server.answer = later(1 << 16, replace)
    with pytest.raises(SourceError, match="changed while it was read"):
        penstock.build(server.url, tmp_path / "store", tokenizer="bytes", documents="lines")
