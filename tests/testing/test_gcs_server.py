"""The server over plain HTTP: what no client asks for in a test, its log, and its process."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import urllib.parse

import pytest
from fake_gcs import (
    FakeGcsError,
    FaultRule,
    GcsControl,
    RequestRecord,
    round_trips,
)
from fake_gcs.api import REWRITE_BYTES

BUCKET = "bucket"


def ask(gcs, method, path, headers=None):
    """Return the status, the headers and the body of a reply."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(gcs.url).netloc, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


@pytest.mark.parametrize("size", [0, 10])
def test_range_that_cannot_be_met(gcs, name, size):
    gcs.put_object(BUCKET, name, b"x" * size)
    path = f"/storage/v1/b/{BUCKET}/o/{name}?alt=media"
    status, headers, _ = ask(gcs, "GET", path, {"Range": f"bytes={size}-"})
    assert (status, headers["content-range"]) == (416, f"bytes */{size}")


def test_not_modified_has_no_body(gcs, name):
    generation = gcs.put_object(BUCKET, name, b"x")
    path = f"/storage/v1/b/{BUCKET}/o/{name}?alt=media&ifGenerationNotMatch={generation}"
    status, _, body = ask(gcs, "GET", path)
    assert (status, body) == (304, b"")


def test_many_objects_come_and_go_in_one_request(gcs, name):
    objects = {f"{name}/{number}": bytes([number, 255]) for number in range(3)}
    gcs.put_objects(BUCKET, {**objects, f"{name}-beside": b"x"})
    assert gcs.objects(BUCKET, f"{name}/") == objects
    assert gcs.object_bytes(BUCKET, f"{name}/1") == objects[f"{name}/1"]
    gcs.delete_objects(BUCKET, f"{name}/")
    assert gcs.object_names(BUCKET, name) == [f"{name}-beside"]


@pytest.mark.parametrize("path", ["/storage/v1/b/bucket/o/missing%2Fone", "/no/such/place"])
def test_errors_have_googles_form(gcs, path):
    status, _, body = ask(gcs, "GET", path)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["errors"][0]["reason"]) == (404, 404, "notFound")


def test_rewrite_takes_two_calls_and_checks_both_ends(gcs, name):
    data = b"x" * (REWRITE_BYTES + 1)
    generation = gcs.put_object(BUCKET, name, data)
    base = f"/storage/v1/b/{BUCKET}/o/{name}/rewriteTo/b/{BUCKET}/o/{name}-copy"
    assert ask(gcs, "POST", f"{base}?ifSourceGenerationMatch=1")[0] == 412
    token, done = "", []
    while not done or not done[-1]:
        query = f"?ifSourceGenerationMatch={generation}&rewriteToken={token}"
        reply = json.loads(ask(gcs, "POST", base + query)[2])
        done.append(reply["done"])
        token = reply.get("rewriteToken", "")
    assert done == [False, True]
    assert gcs.object_bytes(BUCKET, f"{name}-copy") == data
    assert ask(gcs, "POST", f"{base}?ifGenerationMatch=0&rewriteToken={generation}")[0] == 412
    gcs.put_object(BUCKET, name, b"changed since")
    assert ask(gcs, "POST", f"{base}?rewriteToken={generation}")[0] == 400


def test_upload_that_breaks_off_stores_nothing(gcs, name):
    host, port = urllib.parse.urlsplit(gcs.url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        target = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}"
        connection.sendall(
            f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf".encode()
        )
        connection.shutdown(socket.SHUT_WR)
        connection.makefile("rb").read()
    assert gcs.object_names(BUCKET, name) == []


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0),
        ([(1, 2), (2, 3), (3, 4)], 3),
        ([(1, 2), (1, 2), (1, 4)], 1),
        ([(1, 9), (2, 3), (4, 5)], 2),
    ],
)
def test_round_trips_do_not_overlap(spans, expected):
    texts = dict.fromkeys(("method", "path", "operation", "target", "range_header"), "")
    none = {"status": 200, "bytes_in": 0, "bytes_out": 0, "fault": None}
    records = [
        RequestRecord(time_s=begin_s, seconds=end_s - begin_s, **texts, **none)
        for begin_s, end_s in spans
    ]
    assert round_trips(records) == expected


def test_faults_from_another_process_end_with_the_block(gcs, name):
    gcs.put_object(BUCKET, name, b"x")
    path = f"/storage/v1/b/{BUCKET}/o/{name}"
    with GcsControl(gcs.url).fault(FaultRule(kind="status", status_code=500)):
        assert ask(gcs, "GET", path)[0] == 500
        assert [state.hit for state in gcs.fault_states()] == [1]
    assert ask(gcs, "GET", path)[0] == 200


def test_server_process_ends_with_the_one_that_started_it():
    script = (
        "import os, signal\n"
        "from fake_gcs import FakeGcs\n"
        "gcs = FakeGcs(buckets=[]).__enter__()\n"
        "print(gcs.url, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    # Both pipes end only when the server is gone too: it inherited its standard error.
    url = parent.communicate(timeout=120)[0].strip()
    assert url.startswith("http://127.0.0.1:")
    with pytest.raises(FakeGcsError, match="no answer"):
        GcsControl(url).fault_states()
