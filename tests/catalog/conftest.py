"""A server on the loopback that misbehaves as told."""

import hashlib
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import numpy as np
import pytest

from penstock.catalog.download import Wanted

DATA = np.random.default_rng(7).integers(0, 256, 300_000, np.uint8).tobytes()


class Fault:
    """How one request is answered; the default is right."""

    def __init__(self, **settings):
        self.status = None
        self.headers = {}
        self.cut = None  # send this many bytes of the body, and close
        self.stall = None  # send this many, and then nothing
        self.trickle = False  # a byte at a time
        self.length = None  # what Content-Length says
        self.flip = False  # one wrong byte
        self.body = None  # other contents
        self.etag = '"one"'
        self.date = None
        self.ranges = True
        self.if_range = True  # heeded
        self.before = None  # called first
        self.__dict__.update(settings)


class Server:
    """Files by path; the n-th request gets the n-th fault, later ones what they should."""

    def __init__(self):
        self.files = {"/file.bin": DATA}
        self.faults = []
        self.requests = []
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
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if fault.etag:
            handler.send_header("ETag", fault.etag)
        if fault.date:
            handler.send_header("Last-Modified", fault.date)
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
        tag = handler.headers.get("If-Range")
        if fault.if_range and tag and tag not in (fault.etag, fault.date):
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
    return Wanted(
        path=tmp_path / "file.bin", num_bytes=len(DATA), sha256=hashlib.sha256(DATA).hexdigest()
    )


@pytest.fixture
def bare(tmp_path):
    """A file of which nothing is known beforehand."""
    return Wanted(path=tmp_path / "file.bin")


@pytest.fixture
def clock():
    begun = time.monotonic()
    return lambda: time.monotonic() - begun
