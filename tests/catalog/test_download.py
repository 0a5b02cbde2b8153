"""Every way in which a server can fail, and a file that is right in the end or not there."""

import email.utils
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from penstock.catalog.download import Patience, download
from penstock.errors import DiskFullError, FetchError, SourceError
from penstock.store.files import digest_file

DATA = np.random.default_rng(7).integers(0, 256, 300_000, np.uint8).tobytes()  # the server's
QUICK = Patience(
    attempts=4,
    backoff_seconds=0.01,
    max_wait_seconds=3,
    stall_seconds=0.5,
    min_bytes_per_second=1e5,
)
Fault = dict  # how a request is answered: the settings of the server's faults


@pytest.fixture
def bring(server, wanted):
    """Download under the faults that are given; the file is right and nothing is left over."""

    def bring(*faults, file=wanted, url=None, patience=QUICK):
        server.faults = list(faults)
        received = download([url or server.url], file, patience=patience)
        assert file.path.read_bytes() == DATA
        assert list(file.path.parent.iterdir()) == [file.path]
        return received

    return bring


@pytest.fixture
def fails(server, wanted):
    """Download under the faults that are given; there is no file, and an error."""

    def fails(*faults, file=wanted, url=None, patience=QUICK):
        server.faults = list(faults)
        with pytest.raises(FetchError) as caught:
            download([url or server.url], file, patience=patience)
        assert not file.path.exists()
        return str(caught.value)

    return fails


def test_a_good_server_is_asked_once(bring, server):
    assert bring() == len(DATA)
    assert server.ranges == [None]


def test_progress_runs_from_nothing_to_the_whole_file(server, wanted):
    told = []
    download([server.url], wanted, progress=lambda done, total: told.append((done, total)))

    assert told[0] == (0, len(DATA))
    assert told[-1] == (len(DATA), len(DATA))
    assert told == sorted(told)


def test_a_body_that_is_cut_goes_on_where_it_ended(bring, server):
    assert bring(Fault(cut=100_000), Fault(cut=50_000)) == len(DATA)
    assert server.ranges == [None, "bytes=100000-", "bytes=150000-"]
    assert server.requests[1][1]["If-Range"] == '"one"'


def test_a_server_that_cuts_every_answer_is_borne_as_long_as_it_gets_somewhere(bring, server):
    bring(*[Fault(cut=20_000)] * 14)

    assert len(server.requests) == 15


def test_a_server_that_gets_nowhere_is_left(fails, server):
    message = fails(*[Fault(cut=0)] * 9)

    assert len(server.requests) == QUICK.attempts
    assert "the connection ended at byte 0 of 300,000, 4 times in a row" in message


def test_what_came_is_kept_when_patience_ends(fails, bring, server):
    message = fails(Fault(cut=100_000), *[Fault(status=503)] * 9)
    assert "100,000 bytes are kept" in message
    server.requests.clear()

    assert bring() == 200_000
    assert server.ranges == ["bytes=100000-"]


def test_a_stall_is_left_and_the_rest_asked_for(bring, server, clock):
    assert bring(Fault(stall=100_000)) == len(DATA)
    assert server.ranges == [None, "bytes=100000-"]
    assert clock() < 5


def test_a_stall_before_the_answer_ends_too(bring, server):
    bring(Fault(before=lambda: server.stop.wait(2)))


def test_a_byte_at_a_time_is_too_slow(fails, clock):
    message = fails(*[Fault(trickle=True)] * 9)

    assert "bytes came in" in message
    assert clock() < 10


def test_a_length_that_is_too_long_is_refused_at_once(fails, server):
    message = fails(Fault(length=len(DATA) + 5))

    assert "it has 300,005 bytes there, and 300,000 are right" in message
    assert len(server.requests) == 1


def test_a_length_that_is_too_short_is_refused_at_once(fails):
    assert "it has 1,000 bytes there" in fails(Fault(length=1_000))


def test_a_lie_about_the_length_is_found_when_nothing_else_is_known(fails, bare):
    message = fails(*[Fault(length=len(DATA) + 5)] * 99, file=bare)

    assert "it has no such range any more" in message or "byte 300,000 of 300,005" in message


def test_without_a_length_a_cut_is_found_by_size_and_digest(bring, fails, wanted, bare):
    bring(Fault(length="none"))
    wanted.path.unlink()
    bring(Fault(length="none", cut=7), Fault(length="none"))
    bare.path.unlink()

    assert "does not say how long the file is" in fails(Fault(length="none"), file=bare)


def test_a_wrong_byte_is_fetched_once_more(bring, server):
    bring(Fault(flip=True))

    assert server.ranges == [None, None]


def test_a_file_that_stays_wrong_is_thrown_away(fails, tmp_path, wanted):
    message = fails(*[Fault(flip=True)] * 9)

    assert f"and {wanted.sha256} is right" in message
    assert not list(tmp_path.iterdir())


def test_a_part_that_rotted_on_disk_is_fetched_anew(fails, bring, tmp_path):
    fails(Fault(cut=100_000), *[Fault(status=503)] * 9)
    part = tmp_path / ".file.bin.part"
    part.write_bytes(b"?" + part.read_bytes()[1:])

    bring()


def test_busy_servers_are_asked_again(bring, server):
    bring(*[Fault(status=status) for status in (503, 429, 500)])

    assert len(server.requests) == 4


def test_a_server_is_left_alone_as_long_as_it_asks(bring, clock):
    bring(Fault(status=503, headers={"Retry-After": "1"}))

    assert 1 <= clock() < 10


def test_it_may_name_a_date(bring, clock):
    date = email.utils.formatdate(time.time() + 2, usegmt=True)
    bring(Fault(status=429, headers={"Retry-After": date}))

    assert clock() > 0.9


def test_one_that_asks_for_an_hour_is_an_error_that_says_so(fails, server, clock):
    message = fails(Fault(status=503, headers={"Retry-After": "3600"}))

    assert "503 (Service Unavailable) and asks to come back in 3,600 s" in message
    assert clock() < 5


@pytest.mark.parametrize("status", [404, 403, 401, 410])
def test_a_refusal_is_not_asked_again(fails, server, status):
    assert f"the server answered {status}" in fails(*[Fault(status=status)] * 9)
    assert len(server.requests) == 1


def test_the_next_mirror_is_asked_where_one_fails(server, wanted):
    server.faults = [Fault(status=404)]
    download([f"{server.url}?a", server.url], wanted, patience=QUICK)

    assert [path for path, _ in server.requests] == ["/file.bin?a", "/file.bin"]


def test_a_second_mirror_goes_on_where_the_first_ended(server, wanted):
    server.files["/copy.bin"] = DATA
    server.faults = [Fault(cut=100_000), *[Fault(status=503)] * 4, Fault(etag='"other"')]
    other = server.url.replace("file.bin", "copy.bin")
    download([server.url, other], wanted, patience=QUICK)

    assert wanted.path.read_bytes() == DATA
    assert server.ranges[-1] == "bytes=100000-"
    assert "If-Range" not in server.requests[-1][1]


def test_when_all_mirrors_fail_each_says_why(server, wanted):
    server.faults = [Fault(status=404), Fault(status=403)]
    with pytest.raises(FetchError, match=r"404 \(Not Found\)\.\n.*403 \(Forbidden\)"):
        download([server.url, server.url], wanted, patience=QUICK)


def test_a_server_without_ranges_starts_over(bring, server):
    bring(Fault(cut=100_000, ranges=False), Fault(ranges=False))

    assert server.ranges == [None, "bytes=100000-"]


def test_a_changed_file_starts_over_by_if_range(bring, server):
    old = bytes(len(DATA))
    bring(Fault(cut=100_000, body=old, etag='"old"'))

    assert server.requests[1][1]["If-Range"] == '"old"'


def test_a_changed_file_is_noticed_where_if_range_is_ignored(bring, server, bare):
    bring(Fault(cut=100_000, body=bytes(len(DATA)), etag='"old"'), Fault(if_range=False), file=bare)

    assert server.ranges == [None, "bytes=100000-", None]


def test_a_changed_length_is_noticed_too(bring, server, bare):
    old = Fault(cut=100_000, body=bytes(400_000), etag=None, date="Sun, 01 Nov 2026 10:00:00 GMT")
    new = Fault(if_range=False, etag=None)
    bring(old, new, file=bare)

    assert server.ranges == [None, "bytes=100000-", None]


def test_a_date_names_the_version_where_the_tag_is_weak(bring, server, bare):
    date = "Sun, 01 Nov 2026 10:00:00 GMT"
    bring(
        *[Fault(cut=100_000, etag='W/"x"', date=date)] * 2,
        Fault(etag='W/"x"', date=date),
        file=bare,
    )

    assert server.requests[1][1]["If-Range"] == date


def test_without_any_version_an_unknown_file_is_never_continued(bring, server, bare):
    bring(Fault(cut=100_000, etag=None), file=bare)

    assert server.ranges == [None, None]


def test_a_part_that_is_whole_already_only_needs_its_name(bring, server, wanted, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(DATA)

    assert bring() == 0
    assert server.ranges == ["bytes=300000-"]


def test_a_part_that_is_longer_than_the_file_starts_over(bring, server, bare, tmp_path):
    server.faults = [Fault(cut=100_000), *[Fault(status=503)] * 9]
    with pytest.raises(FetchError):
        download([server.url], bare, patience=QUICK)
    with (tmp_path / ".file.bin.part").open("ab") as stream:
        stream.write(bytes(300_000))
    server.requests.clear()

    bring(file=bare)
    assert server.ranges == ["bytes=400000-", None]


def test_redirects_are_followed_with_their_range(bring, server):
    server.files["/moved"] = b""
    moved = [Fault(status=302, headers={"Location": "/file.bin"}) for _ in range(2)]
    bring(moved[0], Fault(cut=100_000), moved[1], url=server.url.replace("file.bin", "moved"))

    assert server.ranges == [None, None, "bytes=100000-", "bytes=100000-"]


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_redirects_lead_nowhere_else(fails, place):
    message = fails(Fault(status=302, headers={"Location": place}))

    assert "redirect" in message or "302" in message


def test_redirects_in_a_circle_end(fails, server):
    fails(*[Fault(status=302, headers={"Location": "/file.bin"})] * 99)

    assert len(server.requests) < 40


def test_nothing_secret_stands_in_a_message(server, fails):
    url = server.url.replace("http://", "http://me:s3cret@") + "?signature=s1gned"
    message = fails(Fault(status=403), url=url)

    assert message == f"{server.url}: the server answered 403 (Forbidden)."
    assert server.requests[0][1]["Authorization"] == "Basic bWU6czNjcmV0"


def test_secrets_are_not_sent_where_a_redirect_leads(server, bring):
    bring(
        Fault(status=302, headers={"Location": server.url}),
        url=server.url.replace("http://", "http://me:s3cret@").replace("file", "moved"),
    )

    assert ["Authorization" in headers for _, headers in server.requests] == [True, False]


def test_the_part_and_its_note_hold_no_secrets(server, fails, tmp_path):
    url = server.url.replace("http://", "http://me:s3cret@") + "?signature=s1gned"
    fails(Fault(cut=100_000), *[Fault(status=503)] * 9, url=url)

    note = (tmp_path / ".file.bin.part.json").read_text()
    assert "s3cret" not in note
    assert "s1gned" not in note


def test_no_network_is_told_in_seconds(wanted, clock):
    with pytest.raises(FetchError, match=r"the connection failed \(Connection refused\), 3 times"):
        download(["http://127.0.0.1:9/file.bin"], wanted, patience=QUICK)
    assert clock() < 5


def test_a_proxy_of_the_environment_is_used(server, bring, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://{server.address}")
    bring(url="http://data.invalid/file.bin")

    assert server.requests[0][0] == "http://data.invalid/file.bin"


@pytest.mark.parametrize("url", ["ftp://host/x", "file:///etc/passwd", "http://", "x"])
def test_what_is_no_address_is_refused(wanted, url):
    with pytest.raises(SourceError, match="is no http:// or https:// address"):
        download([url], wanted, patience=QUICK)


def test_no_room_is_told_before_anything_is_asked(server, wanted, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage())
    with pytest.raises(DiskFullError, match="it needs 300,000 more bytes, and 1,000 are free"):
        download([server.url], wanted, patience=QUICK)


class _Usage:
    free = 1_000


def test_a_link_in_the_way_of_the_part_is_not_followed(server, wanted, tmp_path):
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / ".file.bin.part").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic"):
        download([server.url], wanted, patience=QUICK)

    assert (tmp_path / "precious").read_bytes() == b"precious"


CHILD = """
import sys
from pathlib import Path
from penstock.catalog.download import Wanted, download
url, path, size, sha256 = sys.argv[1:]
download([url], Wanted(path=Path(path), num_bytes=int(size), sha256=sha256))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of Windows are others")
@pytest.mark.parametrize("sent", [0, 1, 150_000, 299_999])
def test_a_killed_download_goes_on(server, wanted, bring, tmp_path, sent):
    server.faults = [Fault(stall=sent)]
    command = [sys.executable, "-c", CHILD, server.url, wanted.path, len(DATA), wanted.sha256]
    running = subprocess.Popen([str(each) for each in command])
    part = tmp_path / ".file.bin.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size == sent) and time.monotonic() < deadline:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait(60) == -signal.SIGKILL
    server.requests.clear()

    assert bring() == len(DATA) - sent
    assert server.ranges == [f"bytes={sent}-" if sent else None]
    assert digest_file(wanted.path) == wanted.sha256


def test_patience_by_default_is_half_a_minute_of_silence():
    assert Patience().stall_seconds == 30
    assert Patience().attempts == 5


FAULTS = [
    Fault(status=503),
    Fault(status=429, headers={"Retry-After": "0"}),
    Fault(cut=0),
    Fault(cut=70_000),
    Fault(flip=True),
    Fault(length=len(DATA) + 9),
    Fault(length=len(DATA) - 9),
    Fault(etag='"new"', if_range=False),
    Fault(etag=None, ranges=False, cut=200_000),
    Fault(length="none", cut=100_000),
    Fault(body=bytes(len(DATA))),
    Fault(status=302, headers={"Location": "/file.bin"}),
    Fault(status=404),
]


@pytest.mark.slow
def test_under_three_faults_in_ten_no_file_is_ever_wrong(server, wanted, figure):
    """A download that gives up is run again, as a person would, on what it kept."""
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
                download([server.url], wanted, patience=QUICK)
                break
            except FetchError:
                assert not wanted.path.exists()
                gave_up += 1
        assert wanted.path.read_bytes() == DATA
        wanted.path.unlink()
    figure(f"150 downloads under 30 % faults: all right, {gave_up} runs gave up with an error")


def test_nothing_of_a_longer_part_is_left_behind_a_new_start(bring, bare, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(bytes(400_000))

    assert bring(file=bare) == len(DATA)
