"""TensorStore's ``gcs`` driver, alone and under OCDBT and Zarr."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorstore as ts

RETRIES = {"max_retries": 8, "initial_delay": "20ms", "max_delay": "200ms"}


def _context() -> ts.Context:
    """A new one each time, so that two stores share no cache."""
    return ts.Context({"gcs_request_retries": RETRIES})


def _open(bucket: str) -> ts.KvStore:
    return ts.KvStore.open({"driver": "gcs", "bucket": bucket}, context=_context()).result()


def _open_ocdbt(bucket: str, path: str) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": f"gs://{bucket}/{path}/"}
    return ts.KvStore.open(spec, context=_context()).result()


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


def count_together(bucket: str, name: str, writers: int, rounds: int) -> int:
    """Each writer adds one, ``rounds`` times, by compare-and-store; the sum at the end."""

    def add(_: int) -> None:
        store = _open(bucket)
        for _ in range(rounds):
            while True:
                found = store.read(name).result()
                value = int(found.value or b"0") + 1
                wanted = found.stamp.generation
                if store.write(name, str(value).encode(), if_equal=wanted).result().generation:
                    break

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(add, range(writers)))
    return int(_open(bucket).read(name).result().value)


def write_ocdbt(bucket: str, path: str, writers: list[int], keys: int) -> None:
    """The writers run at once, each with a database handle of its own."""

    def fill(writer: int) -> None:
        store = _open_ocdbt(bucket, path)
        for key in range(keys):
            store.write(f"writer{writer}/key{key}", b"%d" % (writer * 1000 + key)).result()

    with ThreadPoolExecutor(len(writers)) as pool:
        list(pool.map(fill, writers))


def read_ocdbt(bucket: str, path: str) -> dict[str, bytes]:
    store = _open_ocdbt(bucket, path)
    found = store.list().result()
    return {key.decode(): bytes(store.read(key).result().value) for key in found}


def zarr_together(bucket: str, path: str, writers: int) -> bool:
    """Writers store the stripes of one array, each through a context of its own."""
    wanted = np.arange(writers * 64 * 32, dtype=np.float32).reshape(writers * 64, 32)

    def open_array(create: bool) -> ts.TensorStore:
        return ts.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "ocdbt", "base": f"gs://{bucket}/{path}/"},
                "metadata": {
                    "shape": list(wanted.shape),
                    "data_type": "float32",
                    "chunk_grid": {
                        "name": "regular",
                        "configuration": {"chunk_shape": [16, 32]},
                    },
                },
                "create": create,
                "open": True,
            },
            context=_context(),
        ).result()

    open_array(create=True)

    def fill(writer: int) -> None:
        rows = slice(writer * 64, writer * 64 + 64)
        open_array(create=False)[rows].write(wanted[rows]).result()

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(fill, range(writers)))
    return bool(np.array_equal(open_array(create=False).read().result(), wanted))
