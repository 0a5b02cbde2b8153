"""Every way in which a server can fail: in the end the file is right, or it is not there."""

import email.utils
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import zygote

from penstock.catalog import download as module
from penstock.catalog.download import DownloadLimits
from penstock.catalog.download import download as download_file
from penstock.catalog.receipt import sha256_of
from penstock.errors import DiskFullError, FetchError, SourceError

DATA = np.random.default_rng(7).integers(0, 256, 300_000, np.uint8).tobytes()  # the server's
QUICK = DownloadLimits(
    attempts=4,
    backoff_seconds=0.01,
    max_wait_seconds=3,
    stall_seconds=0.5,
    min_bytes_per_second=1e5,
)
Fault = dict  # how a request is answered: the settings of the server's faults


def download(urls, file, **options):
    return download_file(urls, file.path, num_bytes=file.num_bytes, sha256=file.sha256, **options)


@pytest.fixture
def succeeds(server, wanted):
    """Download under these faults; the file is right and nothing else is left."""

    def succeeds(*faults, file=wanted, url=None, limits=QUICK):
        server.faults = list(faults)
        received = download([url or server.url], file, limits=limits)
        assert file.path.read_bytes() == DATA
        assert list(file.path.parent.iterdir()) == [file.path]
        return received

    return succeeds


@pytest.fixture
def fails(server, wanted):
    """Download under these faults; there is no file, and the error's message is returned."""

    def fails(*faults, file=wanted, url=None, limits=QUICK):
        server.faults = list(faults)
        with pytest.raises(FetchError) as caught:
            download([url or server.url], file, limits=limits)
        assert not file.path.exists()
        return str(caught.value)

    return fails


@pytest.fixture
def waits(monkeypatch):
    """The seconds that a download waits between attempts; it does not really wait."""
    seconds = []
    monkeypatch.setattr(module.time, "sleep", seconds.append)
    return seconds


def test_a_good_server_is_asked_once(succeeds, server):
    assert succeeds() == len(DATA)
    assert server.ranges == [None]


def test_progress_runs_from_nothing_to_the_whole_file(server, wanted):
    seen = []
    download([server.url], wanted, progress=lambda done, total: seen.append((done, total)))

    assert seen[0] == (0, len(DATA))
    assert seen[-1] == (len(DATA), len(DATA))
    assert seen == sorted(seen)


def test_a_body_that_is_cut_is_resumed_where_it_ended(succeeds, server):
    assert succeeds(Fault(cut=100_000), Fault(cut=50_000)) == len(DATA)
    assert server.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_server_that_cuts_every_answer_is_asked_while_the_file_grows(succeeds, server):
    succeeds(*[Fault(cut=20_000)] * 14)

    assert len(server.requests) == 15


def test_a_download_that_makes_no_progress_is_given_up(fails, server):
    message = fails(*[Fault(cut=0)] * 9)

    assert len(server.requests) == QUICK.attempts
    assert "the connection ended at byte 0 of 300,000, 4 times in a row" in message


def test_received_bytes_are_kept_when_a_download_is_given_up(fails, succeeds, server):
    message = fails(Fault(cut=100_000), *[Fault(status=503)] * 9)
    assert "100,000 bytes are kept" in message
    server.requests.clear()

    assert succeeds() == 200_000
    assert server.ranges == ["bytes=100000-"]


def test_a_stall_ends_and_the_rest_is_requested(succeeds, server):
    assert succeeds(Fault(stall=100_000)) == len(DATA)
    assert server.ranges == [None, "bytes=100000-"]


def test_a_stall_before_the_answer_ends_too(succeeds, server):
    succeeds(Fault(before=lambda: server.stop.wait(2)))


def test_headers_without_end_are_cut_by_the_deadline(fails, succeeds, server):
    """Each header comes in time, so the socket's timeout never fires."""
    message = fails(*[Fault(slow_head=True)] * 9)

    assert "the server did not answer within 0.5 s, 3 times in a row" in message
    succeeds(Fault(slow_head=True))


def test_a_byte_at_a_time_is_too_slow(fails):
    assert "bytes came in" in fails(*[Fault(trickle=True)] * 9)


def test_a_length_that_is_too_long_is_refused_at_once(fails, server):
    message = fails(Fault(length=len(DATA) + 5))

    assert "the server has 300,005 bytes, but 300,000 are expected" in message
    assert len(server.requests) == 1


def test_a_length_that_is_too_short_is_refused_at_once(fails):
    assert "the server has 1,000 bytes" in fails(Fault(length=1_000))


def test_a_wrong_length_is_found_if_nothing_else_is_known(fails, bare):
    message = fails(*[Fault(length=len(DATA) + 5)] * 99, file=bare)

    assert "the connection ended at byte 300,000 of 300,005" in message


@pytest.mark.parametrize("length", ["-5", "3e5", "²", "0x10", "9" * 4_300, "9" * 5_000])
def test_a_length_that_is_not_a_number_counts_as_none(fails, bare, length):
    assert "does not report the length" in fails(Fault(length=length), file=bare)


def test_without_a_length_a_cut_is_found_by_size_and_digest(succeeds, fails, wanted, bare):
    succeeds(Fault(length="none"))
    wanted.path.unlink()
    succeeds(Fault(length="none", cut=7), Fault(length="none"))
    bare.path.unlink()

    assert "does not report the length" in fails(Fault(length="none"), file=bare)


def test_a_compressed_answer_is_refused(fails):
    message = fails(Fault(headers={"Content-Encoding": "gzip"}))

    assert "the server compressed the file, though it was asked not to" in message


def test_a_wrong_byte_is_fetched_once_more(succeeds, server):
    succeeds(Fault(flip=True))

    assert server.ranges == [None, None]


def test_a_file_that_stays_wrong_is_deleted(fails, tmp_path, wanted):
    message = fails(*[Fault(flip=True)] * 9)

    assert f"but {wanted.sha256} is expected" in message
    assert not list(tmp_path.iterdir())


def test_a_part_that_was_damaged_on_disk_is_fetched_again(fails, succeeds, tmp_path):
    fails(Fault(cut=100_000), *[Fault(status=503)] * 9)
    part = tmp_path / ".file.bin.part"
    part.write_bytes(b"?" + part.read_bytes()[1:])

    succeeds()


def test_busy_servers_are_asked_again(succeeds, server):
    succeeds(*[Fault(status=status) for status in (503, 429, 500)])

    assert len(server.requests) == 4


def test_waits_double_and_are_as_long_as_the_server_asks(succeeds, waits):
    date = email.utils.formatdate(time.time() + 2.9, usegmt=True)
    succeeds(
        Fault(status=503),
        Fault(status=503, headers={"Retry-After": "1"}),
        Fault(status=429, headers={"Retry-After": date}),
    )

    first, second, third = waits
    assert 0.01 <= first <= 0.015
    assert second == 1
    assert 0 < third <= 3


def test_a_server_that_asks_for_an_hour_is_an_error_that_says_so(fails, waits):
    message = fails(Fault(status=503, headers={"Retry-After": "3600"}))

    assert "503 (Service Unavailable) and asks to retry in 3,600 s" in message
    assert waits == []


@pytest.mark.parametrize("status", [404, 403, 401, 410])
def test_a_refusal_is_not_asked_again(fails, server, status):
    assert f"the server answered {status}" in fails(*[Fault(status=status)] * 9)
    assert len(server.requests) == 1


def test_the_next_mirror_is_asked_if_one_fails(server, wanted):
    server.faults = [Fault(status=404)]
    download([f"{server.url}?a", server.url], wanted, limits=QUICK)

    assert [path for path, _ in server.requests] == ["/file.bin?a", "/file.bin"]


def test_a_second_mirror_resumes_where_the_first_ended(server, wanted):
    server.files["/copy.bin"] = DATA
    server.faults = [Fault(cut=100_000), *[Fault(status=503)] * 4, Fault(etag='"other"')]
    other = server.url.replace("file.bin", "copy.bin")
    download([server.url, other], wanted, limits=QUICK)

    assert wanted.path.read_bytes() == DATA
    assert server.ranges[-1] == "bytes=100000-"


def test_if_all_mirrors_fail_each_failure_is_reported(server, wanted):
    server.faults = [Fault(status=404), Fault(status=403)]
    with pytest.raises(FetchError, match=r"404 \(Not Found\)\.\n.*403 \(Forbidden\)"):
        download([server.url, server.url], wanted, limits=QUICK)


def test_a_server_without_ranges_starts_again(succeeds, server):
    succeeds(Fault(cut=100_000, ranges=False), Fault(ranges=False))

    assert server.ranges == [None, "bytes=100000-"]


def test_a_file_that_changed_between_two_ranges_is_fetched_again(succeeds, server):
    """No ETag is compared: the digest of the whole file decides."""
    succeeds(Fault(cut=100_000, body=bytes(len(DATA)), etag=None), Fault(etag=None))

    assert server.ranges == [None, "bytes=100000-", None]


def test_a_changed_length_is_refused(fails, server):
    message = fails(Fault(cut=100_000), Fault(body=bytes(400_000)))

    assert "the server has 400,000 bytes, but 300,000 are expected" in message


@pytest.mark.parametrize("etag", [None, '"one"', 'W/"x"'])
def test_a_file_of_unknown_digest_is_never_resumed(succeeds, server, bare, etag):
    succeeds(Fault(cut=100_000, etag=etag), file=bare)

    assert server.ranges == [None, None]


def test_another_range_than_the_requested_one_starts_again(succeeds, server):
    succeeds(Fault(cut=100_000), Fault(headers={"Content-Range": "bytes 5-9/300000"}))

    assert server.ranges == [None, "bytes=100000-", None]


@pytest.mark.parametrize("total", ["9" * 5_000, "-300000", "many", "*"])
def test_a_range_of_odd_numbers_starts_again(succeeds, server, total):
    odd = {"Content-Range": f"bytes 100000-299999/{total}"}
    succeeds(Fault(cut=100_000), Fault(headers=odd))

    assert server.ranges == [None, "bytes=100000-", None]


def test_a_message_shows_only_the_beginning_of_a_long_range(fails, wanted):
    wanted.path.with_name(f".{wanted.path.name}.part").write_bytes(DATA[:100_000])
    odd = Fault(headers={"Content-Range": f"bytes 100000-299999/{'9' * 5_000}"})
    message = fails(odd, limits=replace(QUICK, attempts=1))

    assert "instead of the bytes from 100,000" in message
    assert len(message) < 300


@pytest.mark.parametrize("when", ["9" * 5_000, "Mon, 01 Jan 2024 00:00:00 +9999999999999999", "-1"])
def test_an_odd_time_to_wait_is_no_traceback(fails, waits, when):
    assert "503 (Service Unavailable)" in fails(
        *[Fault(status=503, headers={"Retry-After": when})] * 9
    )


def test_a_complete_part_is_checked_without_a_request(succeeds, server, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(DATA)

    assert succeeds() == 0
    assert server.ranges == []


@pytest.mark.parametrize("size", [300_000, 400_000])
def test_a_wrong_part_that_is_not_shorter_than_the_file_starts_again(
    succeeds, server, wanted, tmp_path, size
):
    (tmp_path / ".file.bin.part").write_bytes(bytes(size))

    assert succeeds() == len(DATA)
    assert server.ranges[-1] is None


def test_a_part_longer_than_a_file_of_unknown_size_starts_again(succeeds, server, wanted, tmp_path):
    wanted.num_bytes = None
    (tmp_path / ".file.bin.part").write_bytes(bytes(400_000))

    assert succeeds() == len(DATA)
    assert server.ranges == ["bytes=400000-", None]


def test_nothing_of_a_longer_part_is_left_after_a_new_start(succeeds, bare, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(bytes(400_000))

    assert succeeds(file=bare) == len(DATA)


def test_redirects_are_followed_with_their_range(succeeds, server):
    server.files["/moved"] = b""
    moved = [Fault(status=302, headers={"Location": "/file.bin"}) for _ in range(2)]
    succeeds(moved[0], Fault(cut=100_000), moved[1], url=server.url.replace("file.bin", "moved"))

    assert server.ranges == [None, None, "bytes=100000-", "bytes=100000-"]


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_redirects_to_other_schemes_are_refused(fails, target):
    message = fails(Fault(status=302, headers={"Location": target}))

    assert "redirect" in message or "302" in message


def test_redirects_in_a_circle_end(fails, server):
    fails(*[Fault(status=302, headers={"Location": "/file.bin"})] * 99)

    assert len(server.requests) < 40


def test_no_secret_is_in_a_message(server, fails):
    url = server.url.replace("http://", "http://me:s3cret@") + "?signature=s1gned"
    message = fails(Fault(status=403), url=url)

    assert message == f"{server.url}: the server answered 403 (Forbidden)."
    assert server.requests[0][1]["Authorization"] == "Basic bWU6czNjcmV0"


def test_secrets_are_not_sent_to_the_target_of_a_redirect(server, succeeds):
    succeeds(
        Fault(status=302, headers={"Location": server.url}),
        url=server.url.replace("http://", "http://me:s3cret@").replace("file", "moved"),
    )

    assert ["Authorization" in headers for _, headers in server.requests] == [True, False]


def test_without_a_network_three_attempts_are_made(wanted, waits):
    with pytest.raises(FetchError, match=r"the connection failed \(Connection refused\), 3 times"):
        download(["http://127.0.0.1:9/file.bin"], wanted, limits=QUICK)
    assert len(waits) == 2


def test_a_proxy_of_the_environment_is_used(server, succeeds, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://{server.address}")
    succeeds(url="http://data.invalid/file.bin")

    assert server.requests[0][0] == "http://data.invalid/file.bin"


@pytest.mark.parametrize("url", ["ftp://host/x", "file:///etc/passwd", "http://", "x"])
def test_other_urls_are_refused(wanted, url):
    with pytest.raises(SourceError, match="is not an http:// or https:// URL"):
        download([url], wanted, limits=QUICK)


def test_a_full_disk_is_reported_before_the_transfer(server, wanted, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage())
    with pytest.raises(DiskFullError, match="needs 300,000 more bytes, and 1,000 bytes are free"):
        download([server.url], wanted, limits=QUICK)


class _Usage:
    free = 1_000


CHILD = """
import sys
from pathlib import Path
from penstock.catalog.download import download
url, path, size, sha256 = sys.argv[1:]
download([url], Path(path), num_bytes=int(size), sha256=sha256)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize("sent", [0, 1, 150_000, 299_999])
def test_a_killed_download_is_resumed(server, wanted, succeeds, tmp_path, sent):
    server.faults = [Fault(stall=sent)]
    command = ["-c", CHILD, server.url, wanted.path, len(DATA), wanted.sha256]
    running = zygote.Popen(command)
    part = tmp_path / ".file.bin.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size == sent) and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait(60) == -signal.SIGKILL
    server.requests.clear()

    assert succeeds() == len(DATA) - sent
    assert server.ranges == [f"bytes={sent}-" if sent else None]
    assert sha256_of(wanted.path) == wanted.sha256


def test_by_default_half_a_minute_of_silence_is_allowed():
    assert DownloadLimits().stall_seconds == 30
    assert DownloadLimits().attempts == 5


FAULTS = [
    Fault(status=503),
    Fault(status=429, headers={"Retry-After": "0"}),
    Fault(cut=0),
    Fault(cut=70_000),
    Fault(flip=True),
    Fault(length=len(DATA) + 9),
    Fault(length=len(DATA) - 9),
    Fault(etag='"new"'),
    Fault(etag=None, ranges=False, cut=200_000),
    Fault(length="none", cut=100_000),
    Fault(body=bytes(len(DATA))),
    Fault(status=302, headers={"Location": "/file.bin"}),
    Fault(status=404),
]


@pytest.mark.slow
def test_under_three_faults_in_ten_no_file_is_ever_wrong(server, wanted, figure):
    """A download that gives up is run again with the bytes that it kept, as a user would."""
    generator = np.random.default_rng(18)
    gave_up = 0
    for _ in range(150):
        faulty = generator.random(400) < 0.3
        picked = generator.integers(0, len(FAULTS), 400)
        server.faults = [
            FAULTS[which] if bad else {} for bad, which in zip(faulty, picked, strict=True)
        ]
        for _ in range(20):
            try:
                download([server.url], wanted, limits=QUICK)
                break
            except FetchError:
                assert not wanted.path.exists()
                gave_up += 1
        assert wanted.path.read_bytes() == DATA
        wanted.path.unlink()
    figure(f"150 downloads under 30 % faults: all right, {gave_up} runs gave up with an error")
