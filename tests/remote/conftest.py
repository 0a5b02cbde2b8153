"""An S3 server on this machine (moto's), and a proxy before it that injects faults."""

import http.client
import importlib.util
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

SPEC = importlib.util.spec_from_file_location(
    "fault_proxy", Path(__file__).with_name("fault_proxy.py")
)
fault_proxy = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fault_proxy)

SECRET = "hunter2-never-shown"
"""The secret key of all tests; it must appear in nothing that is written or printed."""
PROXIES = [f"{scheme}_proxy" for scheme in ("http", "https", "all")]
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "penstock",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
_numbers = itertools.count()


@pytest.fixture(scope="session")
def moto_port():
    """The port of moto's S3 server; objects are kept in memory."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    yield running.get_host_and_port()[1]
    running.stop()


@pytest.fixture(scope="session")
def _proxy(moto_port):
    proxy = fault_proxy.FaultProxy(moto_port)
    proxy.start()
    yield proxy
    proxy.stop()


@dataclass
class Bucket:
    """A new bucket, as the tests see it: through the proxy, or directly on the server."""

    name: str
    direct_url: str
    environment: dict
    proxy: object

    @property
    def url(self):
        return f"s3://{self.name}"

    def objects(self):
        """All objects, by key: what the server really holds, without proxy and faults."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            self.name,
            endpoint=self.direct_url,
            access_key_id="penstock",
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        found = {}
        for page in obstore.list(store):
            for each in page:
                found[each["path"]] = bytes(obstore.get(store, each["path"]).bytes())
        return found

    def put(self, key, data):
        """Write an object directly."""
        _put(self.direct_url, f"/{self.name}/{key}", data)


def _put(address, path, data):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    try:
        connection.request("PUT", path, body=data)
        assert connection.getresponse().status == 200
    finally:
        connection.close()


@pytest.fixture
def bucket(_proxy, moto_port, monkeypatch):
    """A new bucket; the environment of this process and of its children leads to it."""
    for name in (*PROXIES, *map(str.upper, PROXIES)):
        monkeypatch.delenv(name, raising=False)
    environment = ENVIRONMENT | {"AWS_ENDPOINT_URL": _proxy.url, "NO_PROXY": "127.0.0.1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    _proxy.set()
    made = Bucket(f"bucket-{next(_numbers)}", f"http://127.0.0.1:{moto_port}", environment, _proxy)
    _put(made.direct_url, f"/{made.name}", b"")
    yield made
    _proxy.set()
