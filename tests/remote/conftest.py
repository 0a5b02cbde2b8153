"""A local S3 server, moto's, in a thread of the tests; a bucket for each test."""

import logging
import re
import threading
import urllib.request
from itertools import count

import pytest

pytest.importorskip("obstore", reason="needs penstock[remote]")
moto_server = pytest.importorskip("moto.server", reason="needs moto[server,s3]")

_numbers = count()


class Server:
    """The server's address, and the requests that it answered."""

    def __init__(self):
        self._log = logging.getLogger("werkzeug")
        self._lines = []
        self._lock = threading.Lock()
        handler = logging.Handler()
        handler.emit = self._keep
        self._log.addHandler(handler)
        self._log.setLevel(logging.INFO)
        self._log.propagate = False
        self._server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.endpoint = "http://{}:{}".format(*self._server.get_host_and_port())

    def _keep(self, record):
        line = re.sub(r"\x1b\[\d+m", "", record.getMessage())  # errors are coloured
        found = re.search(r'"(\w+) (\S+) HTTP/[\d.]+" (\d+)', line)
        if found:
            with self._lock:
                self._lines.append((found[1], found[2], int(found[3])))

    def requests(self, method, text=""):
        """The paths of the requests of a method that contain `text`."""
        with self._lock:
            return [path for each, path, _ in self._lines if each == method and text in path]

    def new_bucket(self):
        name = f"bucket-{next(_numbers)}"
        put = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        urllib.request.urlopen(put, timeout=30).close()
        return name

    def stop(self):
        self._server.stop()


@pytest.fixture(scope="session")
def s3_server():
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server, monkeypatch, tmp_path):
    """The URL of an empty bucket; the environment has its endpoint and keys."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-key")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PENSTOCK_REMOTE_SECONDS", "20")
    return f"s3://{s3_server.new_bucket()}"
