"""Conformance: the real clients do with this server what they do with GCS."""

from __future__ import annotations

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
UNSAYABLE = {"gcsfs": {"ends/with/"}, "tensorstore": {"tab\tin"}}


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


@pytest.fixture(scope="module")
def many_names(start_client):
    wanted = [f"many/{index:05d}" for index in range(2300)]
    start_client("tensorstore").write_all(bucket=BUCKET, names=wanted)
    return wanted


def test_listing_takes_all_pages(client, gcs, many_names):
    assert sorted(client.names(bucket=BUCKET, prefix="many/")) == many_names
    pages = [record for record in gcs.requests() if record.operation == "objects.list"]
    assert len(pages) >= 3


def test_create_only_write(client, name):
    assert client.write_new(bucket=BUCKET, name=name, data=b"first") == "stored"
    assert client.write_new(bucket=BUCKET, name=name, data=b"second") == "not stored"
    assert client.read(bucket=BUCKET, name=name) == b"first"


@pytest.mark.parametrize(("start", "end"), [(0, 1), (3, 700), (999, 1000), (500, None), (0, 1000)])
def test_ranges(client, gcs, name, start, end):
    data = bytes(index % 251 for index in range(1000))
    gcs.put_object(BUCKET, name, data)
    assert client.read_part(bucket=BUCKET, name=name, start=start, end=end) == data[start:end]
    assert bytes_served(gcs.requests()) == len(data[start:end])


@pytest.mark.parametrize("size", [8_960_001, 3 << 18], ids=["odd", "whole chunks"])
def test_upload_in_chunks(start_client, gcs, name, size):
    data = bytes(range(256)) * (size // 256) + b"!" * (size % 256)
    call = {"bucket": BUCKET, "name": name, "chunk_bytes": 1 << 18}
    start_client("gcsfs").write_chunks(data=data, **call)
    assert gcs.object_bytes(BUCKET, name) == data
    chunks = [record for record in gcs.requests() if record.operation == "uploads.chunk"]
    assert len(chunks) >= 3
    assert [record.status for record in chunks] == [308] * (len(chunks) - 1) + [200]


def test_create_only_upload_in_chunks(start_client, gcs, name):
    call = {"bucket": BUCKET, "name": name, "chunk_bytes": 1 << 18}
    data = b"y" * 900_000
    client = start_client("gcsfs")
    assert client.write_new_chunks(data=data, **call) == "stored"
    assert client.write_new_chunks(data=data[::2], **call) == "not stored"
    assert gcs.object_bytes(BUCKET, name) == data


def test_tensorstore_conditions(start_client, name):
    assert start_client("tensorstore").conditions(bucket=BUCKET, name=name) == {
        "unchanged": "unspecified",
        "stale write stored": False,
        "changed": ["value", b"two"],
        "after stale delete": "value",
        "after delete": "missing",
    }
