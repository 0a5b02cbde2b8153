"""A tokenizer from the Hugging Face Hub, played by a server on this machine."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from penstock.tokenize.tokenizer import load_tokenizer

LOAD = """
import sys, penstock
loaded = penstock.load_tokenizer(sys.argv[1])
print(loaded.name, loaded.eos_id, loaded.encode("the cat").tolist())
"""


@pytest.fixture
def hub(small):
    """A Hub with one repository; yields its address and the paths that were asked for."""
    files = {
        "/org/name/resolve/main/tokenizer.json": json.dumps(small).encode(),
        "/org/name/resolve/main/tokenizer_config.json": b'{"eos_token": "[sep]"}',
        "/bare/name/resolve/main/tokenizer.json": json.dumps(small).encode(),
    }
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            data = files.get(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("X-Repo-Commit", "0" * 40)
            if data is None:
                data = b""
                self.send_header("X-Error-Code", "EntryNotFound")
            else:
                self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET  # noqa: N815  (the names that http.server looks for)

        def log_message(self, *arguments):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def environment(address, folder):
    return {
        "HF_ENDPOINT": address,
        "HF_HOME": str(folder),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@pytest.mark.parametrize("name", ["org/name", "hf:org/name", "bare/name"])
def test_a_name_on_the_hub_is_fetched_once_and_then_found_offline(
    name, hub, python, small, small_file, tmp_path
):
    address, asked = hub
    first = python(LOAD, name, **environment(address, tmp_path)).stdout
    asked.clear()
    again = python(LOAD, name, HF_HUB_OFFLINE="1", **environment(address, tmp_path)).stdout
    local = load_tokenizer(small_file).encode("the cat").tolist()

    end = small["added_tokens"][name != "bare/name"]["id"]
    assert first.split(maxsplit=2) == [name.removeprefix("hf:"), str(end), f"{local}\n"]
    assert again == first
    assert asked == []


def test_a_name_that_the_hub_does_not_know_says_what_to_do(hub, python, tmp_path):
    address, _ = hub
    failed = python(LOAD, "no/such", check=False, **environment(address, tmp_path))

    assert failed.returncode == 1
    assert "'no/such' is neither a local path nor in the local Hub cache" in failed.stderr
