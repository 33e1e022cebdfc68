"""gcsfs, as fsspec and epath use it. Its waits between retries are fixed: 1 to 2 s, then double."""

from __future__ import annotations

import gcsfs


def _fs() -> gcsfs.GCSFileSystem:
    """One without listings of an earlier call."""
    return gcsfs.GCSFileSystem(use_listings_cache=False, skip_instance_cache=True)


def write(bucket: str, name: str, data: bytes) -> None:
    _fs().pipe_file(f"{bucket}/{name}", data)


def write_new(bucket: str, name: str, data: bytes) -> str:
    try:
        _fs().pipe_file(f"{bucket}/{name}", data, mode="create")
    except FileExistsError:
        return "not stored"
    return "stored"


def read(bucket: str, name: str) -> bytes | None:
    try:
        return _fs().cat_file(f"{bucket}/{name}")
    except FileNotFoundError:
        return None


def read_part(bucket: str, name: str, start: int | None, end: int | None) -> bytes:
    return _fs().cat_file(f"{bucket}/{name}", start=start, end=end)


def names(bucket: str, prefix: str) -> list[str]:
    found = _fs().find(bucket, prefix=prefix)
    return [path.removeprefix(f"{bucket}/") for path in found]


def delete(bucket: str, name: str) -> None:
    _fs().rm_file(f"{bucket}/{name}")


def write_chunks(bucket: str, name: str, data: bytes, chunk_bytes: int) -> None:
    with _fs().open(f"{bucket}/{name}", "wb", block_size=chunk_bytes) as file:
        for start in range(0, len(data), 100_001):
            file.write(data[start : start + 100_001])


def write_new_chunks(bucket: str, name: str, data: bytes, chunk_bytes: int) -> str:
    try:
        with _fs().open(f"{bucket}/{name}", "xb", block_size=chunk_bytes) as file:
            file.write(data)
    except FileExistsError:
        return "not stored"
    return "stored"
