"""Files of the Hugging Face Hub: huggingface_hub asks about them, on a server of this machine."""

import hashlib
import os
import signal
import subprocess
import sys
import time

import pytest

from penstock.catalog.download import DownloadLimits
from penstock.catalog.download import download as download_file
from penstock.errors import FetchError

PATH = f"/datasets/org/name/resolve/{'a' * 40}/folder/file.bin"
URL = f"https://huggingface.co{PATH}"
DATA = bytes(range(256)) * 1_000
SHA256 = hashlib.sha256(DATA).hexdigest()
QUICK = DownloadLimits(attempts=3, backoff_seconds=0.01, max_wait_seconds=1, stall_seconds=2)


@pytest.fixture
def hub(server, monkeypatch):
    """A Hub with one file; the real one is not asked."""
    server.files = {PATH: DATA}
    monkeypatch.setenv("HF_ENDPOINT", f"http://{server.address}")
    return server


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.bin"


def download(path, **options):
    return download_file([URL], path, **{"limits": QUICK, **options})


CODE = """
import sys
from pathlib import Path
from penstock.catalog.download import download
download([sys.argv[1]], Path(sys.argv[2]))
"""


def run_apart(path, **environment):
    """Download in a new process: huggingface_hub reads its environment when it is imported."""
    inherited = {name: value for name, value in os.environ.items() if "TELEMETRY" not in name}
    home = {"HF_HOME": str(path.parent / "home")}
    return subprocess.run(
        [sys.executable, "-c", CODE, URL, str(path)],
        env={**inherited, **home, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_file_is_asked_about_and_then_transferred(hub, path):
    assert download(path) == len(DATA)
    assert path.read_bytes() == DATA
    assert [each for each, _ in hub.heads] == [PATH]
    assert [each for each, _ in hub.requests] == [PATH]
    assert list(path.parent.iterdir()) == [path]


def test_no_token_and_no_telemetry_is_sent(hub, path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    download(path)

    sent = [*hub.heads, *hub.requests]
    assert len(sent) == 2  # no other request, such as a list of agents
    assert not [headers for _, headers in sent if "authorization" in map(str.lower, headers)]
    assert all("torch" not in headers.get("User-Agent", "").lower() for _, headers in sent)


def test_a_fresh_process_sends_nothing_else(hub, path):
    assert run_apart(path).returncode == 0
    assert [each for each, _ in [*hub.heads, *hub.requests]] == [PATH, PATH]
    assert not (path.parent / "home").exists()


def test_the_digest_of_the_hub_is_used_if_none_is_recorded(hub, path):
    hub.faults = [{"flip": True}]
    assert download(path) == 2 * len(DATA)

    assert path.read_bytes() == DATA


def test_a_file_that_stays_wrong_is_never_given_its_name(hub, path):
    hub.faults = [{"flip": True}] * 9
    with pytest.raises(FetchError, match=f"but {SHA256} is expected"):
        download(path)

    assert list(path.parent.iterdir()) == []


def test_another_digest_than_the_recorded_one_is_refused_before_the_transfer(hub, path):
    with pytest.raises(FetchError, match=f"the Hub has a file with SHA-256 {SHA256}, but 0000"):
        download(path, sha256="0" * 64)

    assert hub.requests == []


def test_a_git_hash_is_not_taken_for_a_digest(hub, path):
    hub.linked[PATH] = "b" * 40
    assert download(path) == len(DATA)
    path.unlink()
    with pytest.raises(FetchError, match="but 0000"):
        download(path, sha256="0" * 64)


def test_a_cut_transfer_is_resumed(hub, path):
    hub.faults = [{"cut": 100_000}]
    assert download(path) == len(DATA)

    assert hub.ranges == [None, "bytes=100000-"]


def test_a_killed_transfer_is_resumed(hub, path):
    hub.faults = [{"stall": 100_000}]
    running = subprocess.Popen([sys.executable, "-c", CODE, URL, str(path)])
    part = path.with_name(".file.bin.part")
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size == 100_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait(60)
    hub.requests.clear()

    assert download(path) == len(DATA) - 100_000
    assert hub.ranges == ["bytes=100000-"]
    assert path.read_bytes() == DATA


def test_redirects_to_a_storage_host_are_followed_and_not_shown(hub, path):
    moved = {"status": 302, "headers": {"Location": f"{PATH}?X-Signature=s1gned"}}
    hub.faults = [moved, {"cut": 1_000}, moved]
    assert download(path) == len(DATA)
    path.unlink()

    hub.faults = [moved, {"status": 403}]
    with pytest.raises(FetchError, match=r"403 \(Forbidden\)") as caught:
        download(path)
    assert "s1gned" not in str(caught.value)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_is_not_asked_again(hub, path, status):
    hub.head_status = status
    with pytest.raises(FetchError, match=f"the server answered {status}"):
        download(path)

    assert len(hub.heads) == 1
    assert hub.requests == []


def test_a_busy_hub_is_asked_again_and_then_reported(hub, path):
    hub.head_status = 503
    with pytest.raises(FetchError, match=r"503 \(Service Unavailable\), 3 times in a row"):
        download(path)

    assert len(hub.heads) == QUICK.attempts


def test_without_a_network_the_url_is_reported(path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match=r"127\.0\.0\.1:9/datasets/.*the connection failed"):
        download(path)


def test_offline_mode_is_respected(hub, path):
    done = run_apart(path, HF_HUB_OFFLINE="1")

    assert "HF_HUB_OFFLINE is set; unset it to download" in done.stderr
    assert hub.heads == hub.requests == []


def test_a_hub_that_does_not_answer_ends_by_the_deadline(hub, path):
    limits = DownloadLimits(attempts=2, backoff_seconds=0.01, stall_seconds=0.3)
    hub.before_head = lambda: hub.stop.wait(20)
    with pytest.raises(FetchError, match=r"did not answer within 0\.3 s|the connection failed"):
        download(path, limits=limits)
    assert len(hub.heads) == 2
