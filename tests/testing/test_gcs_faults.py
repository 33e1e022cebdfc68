"""Each fault, with each real client: what the client makes of it, and what the server holds."""

from __future__ import annotations

import http.client
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote, urlsplit

import pytest
from fake_gcs import FaultRule
from gcs_real_clients import ClientFailure

BUCKET = "bucket"
DATA = bytes(index % 253 for index in range(300_000))


def statuses(gcs, name, operation="*"):
    """(status, fault) of the requests about this object, in order."""
    return [
        (record.status, record.fault)
        for record in gcs.requests()
        if record.target == f"{BUCKET}/{name}" and operation in ("*", record.operation)
    ]


def rule(kind, name, **fields):
    return FaultRule(kind=kind, target=f"{BUCKET}/{name}", **fields)


def plain_upload(url, name, data):
    """One upload by hand, which no client repeats or gives up; returns the status."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    try:
        connection.request(
            "POST",
            f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(name, safe='')}",
            data,
        )
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


@pytest.mark.parametrize("code", [429, 503])
def test_passing_refusals_of_a_write_are_tried_again(client, gcs, name, code):
    gcs.add_fault(rule("status", name, status_code=code, method="POST", count=1))
    client.write(bucket=BUCKET, name=name, data=DATA)
    assert gcs.object_bytes(BUCKET, name) == DATA
    assert statuses(gcs, name) == [(code, "status"), (200, None)]


def test_object_that_seems_missing(client, gcs, name):
    gcs.put_object(BUCKET, name, DATA)
    gcs.add_fault(rule("status", name, status_code=404, operation="objects.media", count=1))
    assert client.read(bucket=BUCKET, name=name) is None
    assert client.read(bucket=BUCKET, name=name) == DATA


@pytest.mark.parametrize("kind", ["reset", "truncate"])
def test_read_that_breaks_in_the_middle_is_whole_in_the_end(client, gcs, name, kind):
    gcs.put_object(BUCKET, name, DATA)
    gcs.add_fault(rule(kind, name, operation="objects.media", after_bytes=100_000, count=1))
    assert client.read(bucket=BUCKET, name=name) == DATA
    reads = [record for record in gcs.requests() if record.operation == "objects.media"]
    assert [record.fault for record in reads] == [kind, None]
    assert reads[0].bytes_out == 100_000


def test_flipped_bit_is_of_one_reply(client, gcs, name):
    gcs.put_object(BUCKET, name, DATA)
    gcs.add_fault(rule("flip", name, operation="objects.media", count=1))
    wrong = client.read(bucket=BUCKET, name=name)
    assert int.from_bytes(wrong) ^ int.from_bytes(DATA) == 1 << 8 * (len(DATA) // 2 - 1)
    assert client.read(bucket=BUCKET, name=name) == DATA


@pytest.mark.parametrize("kind", ["trickle", "throttle"])
def test_slow_server_loses_nothing_in_both_directions(client, gcs, name, kind):
    gcs.add_fault(rule(kind, name, bytes_per_s=2_000_000))
    client.write(bucket=BUCKET, name=name, data=DATA)
    assert client.read(bucket=BUCKET, name=name) == DATA
    assert {fault for _, fault in statuses(gcs, name)} == {kind}


@pytest.mark.parametrize("kind", ["trickle", "throttle", "hold"])
def test_slow_request_ends_when_its_rule_is_taken_back(gcs, name, kind):
    """At this speed the upload would take three days."""
    gcs.put_object(BUCKET, name, DATA)
    gcs.add_fault(rule(kind, name, bytes_per_s=1))
    with ThreadPoolExecutor(1) as pool:
        upload = pool.submit(plain_upload, gcs.url, name, DATA[::-1])
        while not any(state.hit for state in gcs.fault_states()):
            time.sleep(0.01)
        assert not upload.done()
        assert gcs.object_bytes(BUCKET, name) == DATA
        gcs.clear_faults()
        assert upload.result() == 200
    assert gcs.object_bytes(BUCKET, name) == DATA[::-1]
    assert statuses(gcs, name) == [(200, kind)]


def test_lost_reply_of_a_write_is_written_again(client, gcs, name):
    gcs.add_fault(rule("lose_reply", name, method="POST", count=1))
    client.write(bucket=BUCKET, name=name, data=DATA)
    assert gcs.object_bytes(BUCKET, name) == DATA
    assert statuses(gcs, name, "objects.insert") == [(None, "lose_reply"), (200, None)]


def test_lost_reply_of_a_create_only_write(client, gcs, name):
    """The client tries again, finds its own object, and takes it for somebody else's."""
    gcs.add_fault(rule("lose_reply", name, method="POST", count=1))
    assert client.write_new(bucket=BUCKET, name=name, data=DATA) == "not stored"
    assert gcs.object_bytes(BUCKET, name) == DATA
    assert statuses(gcs, name, "objects.insert") == [(None, "lose_reply"), (412, None)]


def test_undue_412_on_a_plain_write(client, gcs, name):
    """TensorStore raises nothing and stores nothing: only the generation tells."""
    gcs.add_fault(rule("status", name, status_code=412, method="POST", count=1))
    if client.name == "tensorstore":
        assert client.write_checked(bucket=BUCKET, name=name, data=DATA) == "not stored"
    else:
        with pytest.raises(ClientFailure, match="FileExistsError"):
            client.write(bucket=BUCKET, name=name, data=DATA)
    assert gcs.object_names(BUCKET, name) == []
    assert statuses(gcs, name, "objects.insert") == [(412, "status")]


@pytest.mark.parametrize("kind", ["status", "lose_reply", "reset"])
@pytest.mark.parametrize("skip", [1, 2])
def test_fault_in_the_middle_of_a_resumable_upload(start_client, gcs, name, kind, skip):
    """The second chunk, and the last one: a chunk that is sent twice counts once."""
    data = DATA * 2
    gcs.add_fault(rule(kind, name, operation="uploads.chunk", skip=skip, count=1))
    start_client("gcsfs").write_chunks(bucket=BUCKET, name=name, data=data, chunk_bytes=1 << 18)
    assert gcs.object_bytes(BUCKET, name) == data
    assert kind in [record.fault for record in gcs.requests()]


def test_lost_reply_at_end_of_create_only_upload_does_no_harm(start_client, gcs, name):
    """Unlike a write in one request: the session remembers that it is done."""
    gcs.add_fault(rule("lose_reply", name, operation="uploads.chunk", skip=2, count=1))
    call = {"bucket": BUCKET, "name": name, "chunk_bytes": 1 << 18}
    assert start_client("gcsfs").write_new_chunks(data=DATA * 2, **call) == "stored"
    assert gcs.object_bytes(BUCKET, name) == DATA * 2
