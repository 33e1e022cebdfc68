"""TensorStore's ``gcs`` driver, alone and under OCDBT and Zarr."""

from __future__ import annotations

import tensorstore as ts

RETRIES = {"max_retries": 8, "initial_delay": "20ms", "max_delay": "200ms"}


def _context() -> ts.Context:
    """A new one each time, so that two stores share no cache."""
    return ts.Context({"gcs_request_retries": RETRIES})


def _open(bucket: str) -> ts.KvStore:
    return ts.KvStore.open({"driver": "gcs", "bucket": bucket}, context=_context()).result()


def write(bucket: str, name: str, data: bytes) -> None:
    _open(bucket).write(name, data).result()


def write_all(bucket: str, names: list[str]) -> None:
    store = _open(bucket)
    for write in [store.write(name, b"") for name in names]:
        write.result()


def write_new(bucket: str, name: str, data: bytes) -> str:
    """A create-only write; what it says of itself: the generation, or none."""
    store = _open(bucket)
    absent = store.read("no object has this name").result().stamp.generation
    stamp = store.write(name, data, if_equal=absent).result()
    return "stored" if stamp.generation else "not stored"


def write_checked(bucket: str, name: str, data: bytes) -> str:
    """A plain write that looks at the generation it got."""
    stamp = _open(bucket).write(name, data).result()
    return "stored" if stamp.generation else "not stored"


def read(bucket: str, name: str) -> bytes | None:
    result = _open(bucket).read(name).result()
    return bytes(result.value) if result.state == "value" else None


def read_part(bucket: str, name: str, start: int | None, end: int | None) -> bytes:
    return bytes(_open(bucket).read(name, byte_range=slice(start, end)).result().value)


def names(bucket: str, prefix: str) -> list[str]:
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return [key.decode() for key in _open(bucket).list(ts.KvStore.KeyRange(prefix, end)).result()]


def delete(bucket: str, name: str) -> None:
    _open(bucket).write(name, None).result()


def conditions(bucket: str, name: str) -> dict[str, object]:
    store = _open(bucket)
    first = store.write(name, b"one").result().generation
    unchanged = store.read(name, if_not_equal=first).result().state
    second = store.write(name, b"two", if_equal=first).result().generation
    stale = store.write(name, b"three", if_equal=first).result().generation
    changed = store.read(name, if_not_equal=first).result()
    store.write(name, None, if_equal=first).result()
    kept = store.read(name).result().state
    store.write(name, None, if_equal=second).result()
    return {
        "unchanged": unchanged,
        "stale write stored": bool(stale),
        "changed": [changed.state, bytes(changed.value)],
        "after stale delete": kept,
        "after delete": store.read(name).result().state,
    }
