"""A server on this machine that fails in every way that a test asks for."""

import hashlib
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest

DATA = np.random.default_rng(7).integers(0, 256, 300_000, np.uint8).tobytes()


class Fault:
    """How one request is answered; without settings, correctly."""

    def __init__(self, **settings):
        self.status = None
        self.headers = {}
        self.cut = None  # send this many bytes of the body, and close
        self.stall = None  # send this many, and then nothing
        self.trickle = False  # a byte at a time
        self.length = None  # the value of Content-Length
        self.flip = False  # one wrong byte
        self.body = None  # other contents
        self.etag = '"one"'
        self.ranges = True
        self.slow_head = False  # a header every 0.05 s, without end
        self.before = None  # called first
        self.__dict__.update(settings)


class Server:
    """Files by path. The n-th GET request gets the n-th fault; later ones get none.

    HEAD requests are answered as the Hugging Face Hub answers them, and get no faults.
    """

    def __init__(self):
        self.files = {"/file.bin": DATA}
        self.faults = []
        self.requests = []
        self.heads = []
        self.head_status = 200
        self.linked = {}  # the ETag that HEAD reports, by path; the SHA-256 by default
        self.before_head = lambda: None  # called before a HEAD request is answered
        self.stop = threading.Event()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                with suppress(ConnectionError), outer._lock:
                    outer.requests.append((self.path, dict(self.headers)))
                    fault = Fault(**(outer.faults.pop(0) if outer.faults else {}))
                with suppress(ConnectionError):
                    outer.answer(self, fault)
                self.close_connection = True

            def do_HEAD(self):
                outer.heads.append((self.path, dict(self.headers)))
                outer.before_head()
                data = outer.files.get(urlsplit(self.path).path)
                status = outer.head_status if data is not None else 404
                self.send_response(status)
                if status == 200:
                    digest = hashlib.sha256(data).hexdigest()
                    self.send_header("X-Repo-Commit", "a" * 40)
                    self.send_header("ETag", f'"{outer.linked.get(self.path, digest)}"')
                    self.send_header("Content-Length", str(len(data)))
                else:
                    self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        self.address = f"127.0.0.1:{self.http.server_address[1]}"
        self.url = f"http://{self.address}/file.bin"

    def answer(self, handler, fault):
        if fault.before:
            fault.before()
        if fault.slow_head:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not self.stop.wait(0.05):
                handler.wfile.write(b"X-More: 1\r\n")
                handler.wfile.flush()
            return
        path = urlsplit(handler.path).path
        data = fault.body if fault.body is not None else self.files.get(path)
        if data is None and fault.status is None:
            fault.status = 404
        if fault.status is not None:
            handler.send_response(fault.status)
            for name, value in fault.headers.items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        start = self.start_of(handler, fault, data)
        if start == "unsatisfiable":
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{len(data)}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        body = data[start:]
        if fault.flip:
            body = bytes([body[0] ^ 1]) + body[1:]
        handler.send_response(206 if start else 200)
        if start and "Content-Range" not in fault.headers:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if fault.etag:
            handler.send_header("ETag", fault.etag)
        if fault.length != "none":
            handler.send_header("Content-Length", str(fault.length or len(body)))
        for name, value in fault.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        self.send(handler.wfile, body, fault)

    def start_of(self, handler, fault, data):
        wanted = handler.headers.get("Range")
        if not wanted or not fault.ranges:
            return 0
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        return start if start < len(data) else "unsatisfiable"

    def send(self, out, body, fault):
        if fault.trickle:
            for byte in body:
                out.write(bytes([byte]))
                out.flush()
                if self.stop.wait(0.02):
                    return
            return
        kept = fault.cut if fault.cut is not None else fault.stall
        out.write(body[:kept] if kept is not None else body)
        out.flush()
        if fault.stall is not None:
            self.stop.wait(20)

    @property
    def ranges(self):
        return [headers.get("Range") for _, headers in self.requests]

    def close(self):
        self.stop.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(5)


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def wanted(tmp_path):
    """A file whose size and SHA-256 are known."""
    return SimpleNamespace(
        path=tmp_path / "file.bin", num_bytes=len(DATA), sha256=hashlib.sha256(DATA).hexdigest()
    )


@pytest.fixture
def bare(tmp_path):
    """A file of which nothing is known beforehand."""
    return SimpleNamespace(path=tmp_path / "file.bin", num_bytes=None, sha256=None)
