"""The proxy of these tests does what it says: faults that are not injected would prove nothing."""

import http.client
from urllib.parse import urlsplit

import pytest

DATA = bytes(range(256)) * 40
# moto does not check the signature, but refuses to read objects for requests without one.
HEADERS = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=penstock/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
}


def ask(bucket, method="GET", key="a/b", body=None):
    """One request on a new connection; returns the status and the body."""
    connection = http.client.HTTPConnection(urlsplit(bucket.proxy.url).netloc, timeout=10)
    try:
        connection.request(method, f"/{bucket.name}/{key}", body=body, headers=HEADERS)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_without_faults_every_answer_passes_unchanged(bucket):
    assert ask(bucket, "PUT", body=DATA)[0] == 200
    assert ask(bucket) == (200, DATA)
    assert ask(bucket, key="absent")[0] == 404
    assert bucket.objects() == {"a/b": DATA}
    assert bucket.proxy.count("GET", "a/b") == 1
    assert not bucket.proxy.faults


@pytest.mark.parametrize("kind", ["503", "429"])
def test_a_refused_write_does_not_reach_the_server(bucket, kind):
    bucket.proxy.set(rate=1, kinds=(kind,))

    assert ask(bucket, "PUT", body=DATA)[0] == int(kind)
    assert bucket.objects() == {}


def test_wrong_bytes_have_the_right_length(bucket):
    bucket.put("a/b", DATA)
    bucket.proxy.set(rate=1, kinds=("wrong",))

    status, found = ask(bucket)

    assert status == 200
    assert len(found) == len(DATA)
    assert sum(one != two for one, two in zip(found, DATA, strict=True)) == 1


@pytest.mark.parametrize("kind", ["reset", "short", "stall", "hang"])
def test_an_answer_that_breaks_off_is_noticed_by_the_client(bucket, kind):
    bucket.put("a/b", DATA)
    bucket.proxy.set(rate=1, kinds=(kind,), stall_seconds=0.01)

    with pytest.raises((http.client.HTTPException, OSError, ValueError)):
        ask(bucket)
    assert bucket.proxy.faults[kind] == 1


def test_a_lost_answer_does_not_mean_that_the_write_failed(bucket):
    bucket.proxy.set(rate=1, kinds=("hang",), stall_seconds=0.01)

    with pytest.raises((http.client.HTTPException, OSError)):
        ask(bucket, "PUT", body=DATA)
    assert bucket.objects() == {"a/b": DATA}


def test_the_same_seed_gives_the_same_faults(bucket):
    bucket.put("a/b", DATA)

    def answers(seed):
        bucket.proxy.set(rate=0.5, seed=seed, kinds=("503",))
        return [ask(bucket)[0] for _ in range(12)]

    assert answers(1) == answers(1) != answers(2)
    assert set(answers(1)) == {200, 503}
