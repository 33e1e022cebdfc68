"""The server over plain HTTP: what no client asks for in a test, and how it starts and ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.parse

import pytest
from fake_gcs import (
    FakeGcs,
    FakeGcsError,
    FaultRule,
    GcsControl,
    Limits,
    bytes_received,
    bytes_served,
)

BUCKET = "bucket"


class Reply:
    def __init__(self, reply: http.client.HTTPResponse) -> None:
        self.status = reply.status
        self.headers = {key.lower(): value for key, value in reply.getheaders()}
        self.body = reply.read()

    def json(self):
        return json.loads(self.body)


def ask(gcs, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(gcs.url).netloc, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        return Reply(connection.getresponse())
    finally:
        connection.close()


def test_media_headers(gcs, name):
    generation = gcs.put_object(BUCKET, name, b"0123456789")
    for path in (
        f"/storage/v1/b/{BUCKET}/o/{name}?alt=media",
        f"/download/storage/v1/b/{BUCKET}/o/{name}?alt=media",
        f"/{BUCKET}/{name}",
    ):
        reply = ask(gcs, "GET", path, headers={"Range": "bytes=-4"})
        assert (reply.status, reply.body) == (206, b"6789")
        assert reply.headers["content-range"] == "bytes 6-9/10"
        assert reply.headers["x-goog-generation"] == str(generation)
        assert reply.headers["x-goog-metageneration"] == "1"
        assert reply.headers["x-goog-stored-content-length"] == "10"
        assert re.fullmatch(r"crc32c=[^,]+==,md5=[^,]+==", reply.headers["x-goog-hash"])


def test_head_gives_the_length_and_no_body(gcs, name):
    gcs.put_object(BUCKET, name, b"0123456789")
    reply = ask(gcs, "HEAD", f"/{BUCKET}/{name}")
    assert (reply.status, reply.headers["content-length"], reply.body) == (200, "10", b"")


@pytest.mark.parametrize(("size", "wanted"), [(10, "bytes=10-"), (0, "bytes=0-")])
def test_range_that_cannot_be_met(gcs, name, size, wanted):
    gcs.put_object(BUCKET, name, b"x" * size)
    reply = ask(gcs, "GET", f"/{BUCKET}/{name}", headers={"Range": wanted})
    assert (reply.status, reply.headers["content-range"]) == (416, f"bytes */{size}")


def test_not_modified_has_no_body(gcs, name):
    generation = gcs.put_object(BUCKET, name, b"x")
    path = f"/storage/v1/b/{BUCKET}/o/{name}?alt=media&ifGenerationNotMatch={generation}"
    reply = ask(gcs, "GET", path)
    assert (reply.status, reply.body) == (304, b"")


def test_errors_have_googles_form(gcs):
    reply = ask(gcs, "GET", "/storage/v1/b/bucket/o/missing%2Fone")
    assert reply.status == 404
    error = reply.json()["error"]
    assert (error["code"], error["errors"][0]["reason"]) == (404, "notFound")
    assert ask(gcs, "GET", "/no/such/place").json()["error"]["code"] == 404
    assert ask(gcs, "POST", "/storage/v1/b", b"{not json").status == 400


def test_rewrite_in_several_calls(gcs, name):
    gcs.put_object(BUCKET, name, b"0123456789")
    base = f"/storage/v1/b/{BUCKET}/o/{name}/rewriteTo/b/{BUCKET}/o/{name}-copy"
    token, done = "", []
    for _ in range(3):
        query = "?maxBytesRewrittenPerCall=4" + (f"&rewriteToken={token}" if token else "")
        reply = ask(gcs, "POST", base + query).json()
        done.append((reply["totalBytesRewritten"], reply["done"]))
        token = reply.get("rewriteToken", "")
    assert done == [("4", False), ("8", False), ("10", True)]
    assert gcs.object_bytes(BUCKET, f"{name}-copy") == b"0123456789"
    gcs.put_object(BUCKET, name, b"changed since")
    stale = ask(gcs, "POST", base + "?rewriteToken=1-4")
    assert stale.status == 400


def test_copy_and_move_check_both_ends(gcs, name):
    gcs.put_object(BUCKET, name, b"x")
    gcs.put_object(BUCKET, f"{name}-there", b"y")
    base = f"/storage/v1/b/{BUCKET}/o/{name}"
    for verb in (f"copyTo/b/{BUCKET}", "moveTo"):
        path = f"{base}/{verb}/o/{name}-there"
        assert ask(gcs, "POST", f"{path}?ifGenerationMatch=0").status == 412
        assert ask(gcs, "POST", f"{path}?ifSourceGenerationMatch=1").status == 412
    assert gcs.object_bytes(BUCKET, f"{name}-there") == b"y"
    assert ask(gcs, "POST", f"{base}/moveTo/o/{name}-there").status == 200
    assert gcs.object_names(BUCKET, name) == [f"{name}-there"]


def test_resumable_upload_by_hand(gcs, name):
    start = ask(
        gcs,
        "POST",
        f"/upload/storage/v1/b/{BUCKET}/o?uploadType=resumable&name={name}",
        b"{}",
        {"X-Upload-Content-Type": "a/b", "X-Upload-Content-Length": "300000"},
    )
    path = start.headers["location"].removeprefix(gcs.url)
    data = bytes(300_000)
    status = ask(gcs, "PUT", path, headers={"Content-Range": "bytes */*", "Content-Length": "0"})
    assert (status.status, status.headers.get("range")) == (308, None)
    first = ask(gcs, "PUT", path, data[: 1 << 18], {"Content-Range": "bytes 0-262143/*"})
    assert (first.status, first.headers["range"]) == (308, "bytes=0-262143")
    wrong = ask(gcs, "PUT", path, data[1 << 18 :], {"Content-Range": "bytes 262144-299999/300001"})
    assert wrong.status == 400
    last = {"Content-Range": "bytes 262144-299999/300000"}
    for method in ("POST", "PUT"):
        reply = ask(gcs, method, path, data[1 << 18 :], last)
        assert (reply.status, reply.json()["contentType"]) == (200, "a/b")
    assert ask(gcs, "DELETE", path).status == 499
    assert ask(gcs, "PUT", path, headers={"Content-Range": "bytes */*"}).status == 404


def test_digest_in_the_metadata_is_checked(gcs, name):
    body = (
        b'--b\r\nContent-Type: application/json\r\n\r\n{"name": "%s", "md5Hash": "AAAA"}\r\n'
        b"--b\r\nContent-Type: a/b\r\n\r\ndata\r\n--b--" % name.encode()
    )
    path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=multipart"
    reply = ask(gcs, "POST", path, body, {"Content-Type": "multipart/related; boundary=b"})
    assert reply.status == 400
    assert gcs.object_names(BUCKET, name) == []


def test_expect_100_continue(gcs, name):
    host, port = urllib.parse.urlsplit(gcs.url).netloc.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        target = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}"
        head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
        connection.sendall(f"{head}Expect: 100-continue\r\nConnection: close\r\n\r\n".encode())
        stream = connection.makefile("rb")
        assert stream.readline() == b"HTTP/1.1 100 Continue\r\n"
        connection.sendall(b"data")
        assert stream.read().count(b"200 OK") == 1
    assert gcs.object_bytes(BUCKET, name) == b"data"


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
    assert ask(gcs, "GET", f"/{BUCKET}/{name}").status == 404


def test_log_counts_bytes_by_object_and_says_who_asked(gcs, name):
    gcs.put_object(BUCKET, f"{name}/a", b"x" * 1000)
    gcs.put_object(BUCKET, f"{name}/b", b"y" * 500)
    assert gcs.requests() == []
    for item, span in (("a", ""), ("a", "bytes=0-99"), ("b", "")):
        headers = {"User-Agent": "me/1"} | ({"Range": span} if span else {})
        ask(gcs, "GET", f"/{BUCKET}/{name}/{item}", headers=headers)
    ask(gcs, "POST", f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}/c", b"zzz")
    records = gcs.requests()
    assert bytes_served(records) == 1600
    assert bytes_served(records, target=f"*/{name}/b") == 500
    assert bytes_received(records) == 3
    assert [record.range_header for record in records] == ["", "bytes=0-99", "", ""]
    assert {record.user_agent for record in records[:3]} == {"me/1"}
    assert all(record.client.startswith("127.0.0.1:") for record in records)
    assert [record.index for record in gcs.requests(since=records[2].index)] == [
        record.index for record in records[2:]
    ]


def test_faults_from_another_process(gcs, name):
    gcs.put_object(BUCKET, name, b"x")
    other = GcsControl(gcs.url)
    with other.fault(FaultRule(kind="status", status_code=500, retry_after_s=7)):
        reply = ask(gcs, "GET", f"/{BUCKET}/{name}")
        assert (reply.status, reply.headers["retry-after"]) == (500, "7")
        assert [state.hit for state in gcs.fault_states()] == [1]
    assert ask(gcs, "GET", f"/{BUCKET}/{name}").status == 200


def test_bad_rule_is_an_error_that_says_why(gcs):
    with pytest.raises(FakeGcsError, match="path_regex"):
        gcs.add_fault(FaultRule(kind="status", path_regex="("))
    reply = ask(gcs, "POST", "/_fake/faults", b'{"kind": "explode"}')
    assert (reply.status, b"explode" in reply.body) == (400, True)


def test_thread_server_stops_and_leaves_no_thread():
    before = set(threading.enumerate())
    with FakeGcs(buckets=["bucket"], limits=Limits(object_bytes=10)) as gcs:
        gcs.put_object("bucket", "a", b"x" * 10)
        with pytest.raises(FakeGcsError, match="413"):
            gcs.put_object("bucket", "a", b"x" * 11)
        with gcs.fault(FaultRule(kind="delay", delay_s=3000.0)):
            waiting = socket.create_connection(urllib.parse.urlsplit(gcs.url).netloc.split(":"))
            waiting.sendall(b"GET /bucket/a HTTP/1.1\r\nHost: x\r\n\r\n")
            gcs.object_names("bucket")
    waiting.close()
    # Not their number: a thread of some other test may end meanwhile.
    assert set(threading.enumerate()) <= before
    with pytest.raises(FakeGcsError, match="no answer"):
        gcs.object_names("bucket")


def test_port_that_is_taken_is_an_error():
    with FakeGcs() as gcs:
        port = urllib.parse.urlsplit(gcs.url).port
        for process in (False, True):
            with pytest.raises(FakeGcsError, match=r"start fake GCS.*in use"):
                FakeGcs(port=port, process=process).start()


def test_server_process_ends_with_the_one_that_started_it():
    script = (
        "import os, signal\n"
        "from fake_gcs import FakeGcs\n"
        "gcs = FakeGcs(process=True).start()\n"
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


def test_environment_keeps_proxy_exceptions(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "example.test")
    environment = GcsControl("http://127.0.0.1:1").environment()
    assert environment["NO_PROXY"] == "127.0.0.1,example.test,localhost"
    assert os.environ["NO_PROXY"] == "example.test"
