"""Conformance: the three real clients do with this server what they do with GCS."""

from __future__ import annotations

import base64
import hashlib

import google_crc32c
import pytest
from fake_gcs import bytes_served

BUCKET = "bucket"
ODD_NAMES = [
    "with space",
    "plus+and&amp=x?y#z",
    "100%",
    "coded%2Fslash",
    "ünïcödé/日本語/🙂",
    "two//slashes",
    "ends/with/",
    "quote'\"back\\slash",
    "dots/../up/./x",
    "~tilde:colon;semi,comma@at!$*()[]{}|^`<>=",
    "tab\tin",
]
# What a client cannot say, whatever the server: names it refuses or reads otherwise.
UNSAYABLE = {"gcsfs": {"ends/with/"}, "tensorstore": {"tab\tin"}, "storage": set[str]()}


def test_write_read_overwrite_delete(client, name):
    client.write(bucket=BUCKET, name=name, data=b"one")
    assert client.read(bucket=BUCKET, name=name) == b"one"
    client.write(bucket=BUCKET, name=name, data=b"longer than one")
    assert client.read(bucket=BUCKET, name=name) == b"longer than one"
    client.delete(bucket=BUCKET, name=name)
    assert client.read(bucket=BUCKET, name=name) is None


def test_every_byte_value_survives(client, gcs, name):
    data = bytes(range(256)) * 4000 + b"\r\n--==0==--\n--==0==--\r\n"
    client.write(bucket=BUCKET, name=name, data=data)
    assert gcs.object_bytes(BUCKET, name) == data
    assert client.read(bucket=BUCKET, name=name) == data


def test_empty_object(client, gcs, name):
    client.write(bucket=BUCKET, name=name, data=b"")
    assert client.read(bucket=BUCKET, name=name) == b""
    assert gcs.object_fields(BUCKET, name)["size"] == "0"


def test_odd_names(client, gcs, name):
    wanted = sorted(f"{name}/{odd}" for odd in ODD_NAMES if odd not in UNSAYABLE[client.name])
    for odd in wanted:
        client.write(bucket=BUCKET, name=odd, data=odd.encode())
    assert gcs.object_names(BUCKET, f"{name}/") == wanted
    assert sorted(client.names(bucket=BUCKET, prefix=f"{name}/")) == wanted
    assert [client.read(bucket=BUCKET, name=odd) for odd in wanted] == [
        odd.encode() for odd in wanted
    ]
    for odd in wanted:
        client.delete(bucket=BUCKET, name=odd)
    assert gcs.object_names(BUCKET, f"{name}/") == []


@pytest.mark.parametrize("client_name", ["tensorstore", "storage"])
def test_leading_slash(client_name, start_client, gcs, name):
    """gcsfs cannot say such a name: it drops the slash."""
    client = start_client(client_name)
    client.write(bucket=BUCKET, name=f"/{name}", data=b"x")
    assert gcs.object_names(BUCKET, f"/{name}") == [f"/{name}"]
    assert client.read(bucket=BUCKET, name=f"/{name}") == b"x"
    assert client.names(bucket=BUCKET, prefix=f"/{name}") == [f"/{name}"]


@pytest.fixture(scope="module")
def many_names(server, start_client):
    server.create_bucket("many")
    wanted = [f"n/{index:05d}" for index in range(2300)]
    start_client("tensorstore").write_all(bucket="many", names=wanted)
    return wanted


def test_listing_takes_all_pages(client, gcs, many_names):
    assert sorted(client.names(bucket="many", prefix="n/")) == many_names
    pages = [record for record in gcs.requests() if record.operation == "objects.list"]
    assert len(pages) >= 3


def test_missing_bucket(client):
    with pytest.raises(Exception, match=r"(?i)not.?found|404|no-such"):
        client.write(bucket="no-such-bucket", name="x", data=b"x")


def test_create_only_write(client, name):
    assert client.write_new(bucket=BUCKET, name=name, data=b"first") == "stored"
    assert client.write_new(bucket=BUCKET, name=name, data=b"second") == "not stored"
    assert client.read(bucket=BUCKET, name=name) == b"first"


@pytest.mark.parametrize(("start", "end"), [(0, 1), (3, 700), (999, 1000), (500, None), (0, 1000)])
def test_ranges(client, gcs, name, start, end):
    data = bytes(index % 251 for index in range(1000))
    gcs.put_object(BUCKET, name, data)
    assert client.read_part(bucket=BUCKET, name=name, start=start, end=end) == data[start:end]
    wanted = len(data[start:end])
    assert bytes_served(gcs.requests(), target=f"{BUCKET}/{name}") == wanted


@pytest.mark.parametrize("client_name", ["tensorstore", "gcsfs"])
def test_range_from_the_end(client_name, start_client, gcs, name):
    gcs.put_object(BUCKET, name, b"0123456789")
    part = start_client(client_name).read_part(bucket=BUCKET, name=name, start=-3, end=None)
    assert part == b"789"


@pytest.mark.parametrize("way", ["write_chunks", "pipe_chunks"])
def test_upload_in_several_chunks(chunking_client, gcs, name, way):
    data = bytes(range(256)) * 35_000 + b"!"  # above 8 MiB, where google-cloud-storage begins
    getattr(chunking_client, way)(bucket=BUCKET, name=name, data=data, chunk_bytes=1 << 20)
    assert gcs.object_bytes(BUCKET, name) == data
    chunks = [record for record in gcs.requests() if record.operation == "uploads.chunk"]
    assert len(chunks) >= 9
    assert [record.status for record in chunks] == [308] * (len(chunks) - 1) + [200]


def test_upload_in_chunks_of_exactly_the_size(chunking_client, gcs, name):
    data = b"x" * (3 << 18)
    chunking_client.write_chunks(bucket=BUCKET, name=name, data=data, chunk_bytes=1 << 18)
    assert gcs.object_bytes(BUCKET, name) == data


def test_create_only_upload_in_chunks(chunking_client, gcs, name):
    call = {"bucket": BUCKET, "name": name, "chunk_bytes": 1 << 18}
    data = b"y" * 9_000_000
    assert chunking_client.write_new_chunks(data=data, **call) == "stored"
    assert chunking_client.write_new_chunks(data=data[::2], **call) == "not stored"
    assert gcs.object_fields(BUCKET, name)["size"] == "9000000"


def test_tensorstore_conditions(start_client, name):
    assert start_client("tensorstore").conditions(bucket=BUCKET, name=name) == {
        "unchanged": "unspecified",
        "stale write stored": False,
        "changed": ["value", b"two"],
        "after stale delete": "value",
        "after delete": "missing",
    }


def test_storage_conditions(start_client, name):
    assert start_client("storage").conditions(bucket=BUCKET, name=name) == {
        "rises": True,
        "stale write": 412,
        "stale delete": 412,
        "old generation": 412,
        "not modified": 304,
        "metageneration": 412,
        "gone generation": 412,
        "value": b"two",
    }


def _base64(data):
    return base64.b64encode(data).decode()


def test_storage_metadata(start_client, name):
    assert start_client("storage").metadata(bucket=BUCKET, name=name) == {
        "metadata": {"step": "8"},
        "cache_control": "no-store",
        "content_type": "text/x-test",
        "metageneration": 2,
        "same generation": True,
        "size": 4,
        "crc32c": _base64(google_crc32c.value(b"data").to_bytes(4, "big")),
        "md5": _base64(hashlib.md5(b"data").digest()),
    }


def test_storage_copy_rewrite_compose_move_batch(start_client, name):
    assert start_client("storage").copies(bucket=BUCKET, top=name) == {
        "listed": ["1", "composed", "copied", "moved", "rewritten"],
        "rewrite": [None, 3, 3],
        "composed": [b"onetwo", 2, None],
        "moved": b"two",
        "left": ["composed", "moved"],
    }


def test_storage_batch_reports_its_failures(start_client, gcs, name):
    found = start_client("storage").batch_with_a_missing_one(bucket=BUCKET, name=name)
    assert found == "not found"
    assert gcs.object_names(BUCKET, name) == []


def test_gcsfs_directories(start_client, name):
    assert start_client("gcsfs").tree(bucket=BUCKET, top=name) == {
        "listed": ["/4", "/a", "/b"],
        "globbed": ["/a/1", "/b/c/3"],
        "is_dir": [True, False, False],
        "merged": b"a/1a/2",
        "colour": "blue",
        "left": ["/b/5", "/b/6", "/b/7", "/b/c/3"],
        "end": False,
    }


@pytest.mark.parametrize("client_name", ["gcsfs", "storage"])
def test_buckets(client_name, start_client):
    found = start_client(client_name).buckets()
    assert f"made-by-{client_name}" in found
    assert BUCKET in found
