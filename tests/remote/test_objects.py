"""Files in object storage: reads, writes, errors and deadlines."""

import os
import pickle
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import xxhash

from penstock.errors import MissingStoreError, RemoteError, StoreError
from penstock.store.objects import Objects

SECRET = "me:pass-word@"
QUERY = "?X-Amz-Signature=0123abcd"


def test_a_file_is_read_as_it_was_written(s3, tmp_path):
    objects = Objects(f"{s3}/some/prefix")
    data = os.urandom(3 << 20)
    (tmp_path / "file").write_bytes(data)

    objects.put("a.npy", data)
    objects.put("deep/b.npy", tmp_path / "file")

    assert objects.read("a.npy") == objects.read("deep/b.npy") == data
    assert objects.size("a.npy") == len(data)
    assert objects.list() == [("a.npy", len(data)), ("deep/b.npy", len(data))]
    digest = objects.download("a.npy", tmp_path / "copy", len(data))
    assert digest == xxhash.xxh3_128(data).hexdigest()
    assert (tmp_path / "copy").read_bytes() == data
    objects.delete("a.npy")
    objects.delete("a.npy")
    assert objects.list() == [("deep/b.npy", len(data))]


def test_a_large_file_is_sent_in_pieces(s3, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.store.objects._MULTIPART_BYTES", 1 << 20)
    monkeypatch.setattr("penstock.store.objects._MULTIPART_CHUNK", 5 << 20)
    objects = Objects(s3)
    (tmp_path / "file").write_bytes(data := os.urandom(11 << 20))

    objects.put("large", tmp_path / "file")

    assert objects.read("large") == data


def test_an_empty_file_is_downloaded(s3, tmp_path):
    objects = Objects(s3)
    objects.put("empty", b"")

    assert objects.download("empty", tmp_path / "copy", 0) == xxhash.xxh3_128().hexdigest()
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_file_that_does_not_exist_is_an_error_at_once(s3, tmp_path, s3_server):
    objects = Objects(f"{s3}/owt")

    for read in (
        lambda: objects.read("gone"),
        lambda: objects.size("gone"),
        lambda: objects.download("gone", tmp_path / "copy", 5),
    ):
        with pytest.raises(MissingStoreError, match=rf"^{s3}/owt/gone does not exist\.$"):
            read()
    assert len(s3_server.requests("GET", f"{s3[5:]}/owt/gone")) == 2


def test_objects_are_pickled_and_a_forked_process_refuses_to_use_them(s3):
    """obstore runs threads, and a fork copies none: a request would wait for ever."""
    objects = Objects(s3)
    objects.put("file", b"some bytes")

    assert pickle.loads(pickle.dumps(objects)).read("file") == b"some bytes"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(RemoteError, match=rf"^{s3}/file cannot be read in this process: "):
                objects.read("file")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "s3://", "stores/owt", f"file://{SECRET}host/x{QUERY}"]
)
def test_other_urls_are_refused_without_secrets(url):
    with pytest.raises(StoreError, match="is not the URL of a remote store") as caught:
        Objects(url)
    assert "pass-word" not in str(caught.value)
    assert "0123abcd" not in str(caught.value)


def test_an_hf_url_without_a_repository_is_refused_without_secrets():
    with pytest.raises(StoreError, match="'hf://datasets/x' does not name a repository") as caught:
        Objects(f"hf://{SECRET}datasets/x{QUERY}").read("file")
    assert "pass-word" not in str(caught.value)
    assert "0123abcd" not in str(caught.value)


@pytest.mark.parametrize("value", ["0", "-1", "ten", "nan", "inf"])
def test_a_deadline_that_is_not_a_number_of_seconds_is_refused(value, monkeypatch):
    monkeypatch.setenv("PENSTOCK_REMOTE_SECONDS", value)

    with pytest.raises(RemoteError, match=f"PENSTOCK_REMOTE_SECONDS is '{value}'"):
        Objects("s3://bucket/x")


# A web server that does what a test asks for.


class Web:
    """A web server; `answers` are functions of a handler, one for each request, the last for all
    further requests."""

    def __init__(self):
        self.answers, self.seen = [], []
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                web.seen.append((self.path, dict(self.headers)))
                answer = web.answers.pop(0) if len(web.answers) > 1 else web.answers[0]
                answer(self)

            do_HEAD = do_GET  # noqa: N815  (the name that the standard library calls)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.host = f"127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def web():
    server = Web()
    yield server
    server.close()


def whole(body, length=None, status=200, after=None):
    """An answer with `body`; `length` is the length that its headers claim."""

    def answer(handler):
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)
        handler.wfile.flush()
        if after:
            after(handler)
        if length is not None:
            handler.close_connection = True

    return answer


def ranged(body):
    """An answer with the part of `body` that was asked for."""

    def answer(handler):
        asked = handler.headers.get("Range", f"bytes=0-{len(body) - 1}").removeprefix("bytes=")
        start, _, last = asked.partition("-")
        part = body[int(start) : int(last) + 1]
        handler.send_response(206 if "Range" in handler.headers else 200)
        handler.send_header("Content-Length", str(len(part)))
        handler.send_header("Content-Range", f"bytes {start}-{last}/{len(body)}")
        handler.end_headers()
        handler.wfile.write(part)

    return answer


BODY = bytes(range(256)) * 16_000  # 4 MB
DIGEST = xxhash.xxh3_128(BODY).hexdigest()


def test_a_download_that_breaks_off_is_continued_where_it_ended(web, tmp_path):
    web.answers = [whole(BODY[:3_000_000], len(BODY)), ranged(BODY)]
    objects = Objects(f"http://{web.host}/x", seconds=20)

    assert objects.download("a", tmp_path / "a", len(BODY)) == DIGEST
    assert (tmp_path / "a").read_bytes() == BODY
    first, second = (headers.get("range") for _, headers in web.seen)
    assert first is None
    assert second is not None
    assert second.startswith("bytes=")


def test_a_server_without_ranges_is_asked_for_the_whole_file_again(web, tmp_path):
    web.answers = [whole(BODY[:3_000_000], len(BODY)), whole(BODY)]
    objects = Objects(f"http://{web.host}/x", seconds=20)

    assert objects.download("a", tmp_path / "a", len(BODY)) == DIGEST
    assert (tmp_path / "a").read_bytes() == BODY


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(web, status):
    web.answers = [whole(b"", status=status), whole(b"", status=status), whole(b"contents")]

    assert Objects(f"http://{web.host}/x", seconds=20).read("a") == b"contents"
    assert len(web.seen) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 410])
def test_a_refusal_is_an_error_at_once_and_shows_no_secret(web, status):
    web.answers = [whole(b"<Error><Code>Denied</Code><K>a-secret</K></Error>", status=status)]
    objects = Objects(f"http://{SECRET}{web.host}/x{QUERY}", seconds=20)

    with pytest.raises(RemoteError, match=rf"answered {status}") as caught:
        objects.read("a")
    assert len(web.seen) == 1
    for text in (str(caught.value), repr(caught.value), repr(objects), str(objects)):
        assert not [secret for secret in ("pass-word", "0123abcd", "a-secret") if secret in text]
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_user_password_and_query_are_sent_with_each_request(web):
    web.answers = [whole(b"contents")]

    Objects(f"http://{SECRET}{web.host}/x{QUERY}", seconds=20).read("a/b.npy")
    path, headers = web.seen[0]
    assert path == f"/x/a/b.npy{QUERY}"
    assert headers["authorization"] == "Basic bWU6cGFzcy13b3Jk"


def test_a_password_is_not_sent_to_the_target_of_a_redirect(web):
    target = Web()
    target.answers = [whole(b"contents")]

    def redirect(handler):
        handler.send_response(302)
        handler.send_header("Location", f"http://{target.host}/elsewhere")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    web.answers = [redirect]
    try:
        assert Objects(f"http://{SECRET}{web.host}/x", seconds=20).read("a") == b"contents"
    finally:
        target.close()
    assert "authorization" in {name.lower() for name in web.seen[0][1]}
    assert "authorization" not in {name.lower() for name in target.seen[0][1]}


def stall(handler):
    time.sleep(8)


def trickle(handler):
    for _ in range(80):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.1)


@pytest.mark.parametrize("after", [stall, trickle])
def test_a_server_that_stalls_or_trickles_ends_in_an_error_by_the_deadline(web, tmp_path, after):
    web.answers = [whole(b"x" * 1_000, len(BODY), after=after)]
    objects = Objects(f"http://{SECRET}{web.host}/x{QUERY}", seconds=2)

    with pytest.raises(
        RemoteError, match=r"x/a could not be downloaded within 2 s, in \d+ attempts"
    ) as caught:
        objects.download("a", tmp_path / "a", len(BODY))
    assert "PENSTOCK_REMOTE_SECONDS" in str(caught.value)
    assert "0123abcd" not in str(caught.value)


def test_a_server_that_is_not_there_is_an_error_by_the_deadline(web):
    host = web.host
    web.close()

    with pytest.raises(RemoteError, match="the connection failed"):
        Objects(f"http://{host}/x", seconds=1).read("a")


def test_a_file_of_another_size_is_not_downloaded(web, tmp_path):
    web.answers = [whole(BODY)]

    with pytest.raises(RemoteError, match=r"it has 4,096,000 bytes, and not 100"):
        Objects(f"http://{web.host}/x", seconds=1).download("a", tmp_path / "a", 100)


def test_web_servers_are_neither_listed_nor_written(web):
    objects = Objects(f"http://{web.host}/x")

    for call in (lambda: objects.put("a", b""), lambda: objects.delete("a"), objects.list):
        with pytest.raises(RemoteError, match="cannot be"):
            call()


def test_an_hf_url_names_a_repository_of_the_hub(web, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.setenv("HF_ENDPOINT", f"http://{web.host}")
    web.answers = [whole(b"contents")]

    Objects("hf://datasets/me/tokens@v1/owt", seconds=5).read("penstock.json")
    path, headers = web.seen[0]
    assert path == "/datasets/me/tokens/resolve/v1/owt/penstock.json"
    assert headers["authorization"] == "Bearer hf_token"
    with pytest.raises(StoreError, match="does not name a repository of the Hugging Face Hub"):
        Objects("hf://me/tokens").read("penstock.json")
