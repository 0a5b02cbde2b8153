"""A local S3 server, moto's, in a thread of the tests; a bucket for each test.

s3       the URL of a bucket, directly on the server
bucket   a bucket behind a proxy that injects faults: see fault_proxy.py
"""

import importlib.util
import logging
import re
import threading
import urllib.request
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("obstore", reason="needs penstock[remote]")
moto_server = pytest.importorskip("moto.server", reason="needs moto[server,s3]")

SPEC = importlib.util.spec_from_file_location(
    "fault_proxy", Path(__file__).with_name("fault_proxy.py")
)
fault_proxy = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fault_proxy)

SECRET = "hunter2-never-shown"
"""The secret key of `bucket`; it must appear in nothing that is written or printed."""
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

    def forget(self):
        """Forget all requests so far."""
        with self._lock:
            self._lines.clear()

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


@dataclass
class Bucket:
    """A bucket as the tests see it: through the proxy, or directly on the server."""

    name: str
    endpoint: str
    proxy: object
    secret: str = SECRET

    @property
    def url(self):
        return f"s3://{self.name}"

    def _direct(self):
        from obstore.store import S3Store

        return S3Store(
            self.name,
            endpoint=self.endpoint,
            access_key_id="a-key",
            secret_access_key="another",
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def objects(self, prefix=""):
        """All objects below a prefix, by name: what the server holds, without faults."""
        import obstore

        store, found = self._direct(), {}
        for page in obstore.list(store, prefix or None):
            for each in page:
                data = bytes(obstore.get(store, each["path"]).bytes())
                found[each["path"].removeprefix(f"{prefix}/")] = data
        return found

    def put(self, key, data):
        """Write an object directly."""
        import obstore

        obstore.put(self._direct(), key, data)

    def delete(self, key):
        """Delete an object directly."""
        import obstore

        obstore.delete(self._direct(), key)


@pytest.fixture(scope="session")
def _proxy(s3_server):
    proxy = fault_proxy.FaultProxy(urlsplit(s3_server.endpoint).port)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
def bucket(s3, s3_server, _proxy, monkeypatch):
    """A bucket behind the proxy; the environment of this process and its children leads there."""
    for scheme in ("http", "https", "all"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme}_proxy".upper(), raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", _proxy.url)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    _proxy.set()
    yield Bucket(s3.removeprefix("s3://"), s3_server.endpoint, _proxy)
    _proxy.set()
