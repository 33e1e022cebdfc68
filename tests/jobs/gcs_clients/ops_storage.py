"""google-cloud-storage."""

from __future__ import annotations

import io

from google.api_core.exceptions import GoogleAPICallError, NotFound, PreconditionFailed
from google.cloud import storage
from google.cloud.storage.exceptions import InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY

RETRY = DEFAULT_RETRY.with_delay(initial=0.02, maximum=0.2, multiplier=2.0).with_timeout(20.0)


def _blob(bucket: str, name: str, chunk_bytes: int | None = None) -> storage.Blob:
    return storage.Client().bucket(bucket).blob(name, chunk_size=chunk_bytes)


def write(bucket: str, name: str, data: bytes) -> None:
    _blob(bucket, name).upload_from_string(data, retry=RETRY)


def write_new(bucket: str, name: str, data: bytes) -> str:
    try:
        _blob(bucket, name).upload_from_string(data, if_generation_match=0, retry=RETRY)
    except PreconditionFailed:
        return "not stored"
    return "stored"


def read(bucket: str, name: str) -> bytes | None:
    try:
        return _blob(bucket, name).download_as_bytes(retry=RETRY)
    except NotFound:
        return None


def read_part(bucket: str, name: str, start: int | None, end: int | None) -> bytes:
    last = None if end is None else end - 1
    return _blob(bucket, name).download_as_bytes(start=start, end=last, retry=RETRY)


def names(bucket: str, prefix: str) -> list[str]:
    return [blob.name for blob in storage.Client().list_blobs(bucket, prefix=prefix)]


def delete(bucket: str, name: str) -> None:
    _blob(bucket, name).delete(retry=RETRY)


def write_chunks(bucket: str, name: str, data: bytes, chunk_bytes: int) -> None:
    """A stream of unknown length, so the total comes with the last chunk only."""
    with _blob(bucket, name).open("wb", chunk_size=chunk_bytes, retry=RETRY) as file:
        file.write(data)


def pipe_chunks(bucket: str, name: str, data: bytes, chunk_bytes: int) -> None:
    """A file of known length, above the size for which the client takes one request."""
    blob = _blob(bucket, name, chunk_bytes)
    blob.upload_from_file(io.BytesIO(data), size=len(data), checksum="crc32c", retry=RETRY)


def write_new_chunks(bucket: str, name: str, data: bytes, chunk_bytes: int) -> str:
    blob = _blob(bucket, name)
    try:
        with blob.open("wb", chunk_size=chunk_bytes, if_generation_match=0, retry=RETRY) as file:
            file.write(data)
    except InvalidResponse as error:  # what a refused start of an upload becomes there
        return "not stored" if error.response.status_code == 412 else str(error)
    return "stored"


def conditions(bucket: str, name: str) -> dict[str, object]:
    blob = _blob(bucket, name)
    blob.upload_from_string(b"one")
    first = blob.generation
    blob.upload_from_string(b"two", if_generation_match=first)
    second = blob.generation
    return {
        "rises": second > first,
        "stale write": _status(blob.upload_from_string, b"x", if_generation_match=first),
        "stale delete": _status(blob.delete, if_generation_match=first),
        "old generation": _status(blob.reload, if_generation_match=first),
        "not modified": _status(blob.reload, if_generation_not_match=second),
        "metageneration": _status(blob.reload, if_metageneration_match=7),
        "gone generation": _status(_blob(bucket, name).download_as_bytes, if_generation_match=1),
        "value": blob.download_as_bytes(if_generation_match=second),
    }


def _status(call: object, *args: object, **kwargs: object) -> int:
    try:
        call(*args, **kwargs)
    except GoogleAPICallError as error:
        return int(error.code)
    return 200


def metadata(bucket: str, name: str) -> dict[str, object]:
    blob = _blob(bucket, name)
    blob.metadata = {"step": "7"}
    blob.cache_control = "no-store"
    blob.upload_from_string(b"data", content_type="text/x-test")
    blob.metadata = {"step": "8"}
    blob.patch()
    again = storage.Client().bucket(bucket).get_blob(name)
    return {
        "metadata": again.metadata,
        "cache_control": again.cache_control,
        "content_type": again.content_type,
        "metageneration": again.metageneration,
        "same generation": again.generation == blob.generation,
        "size": again.size,
        "crc32c": again.crc32c,
        "md5": again.md5_hash,
    }


def copies(bucket: str, top: str) -> dict[str, object]:
    client = storage.Client()
    home = client.bucket(bucket)
    first, second = home.blob(f"{top}/1"), home.blob(f"{top}/2")
    first.upload_from_string(b"one")
    second.upload_from_string(b"two")
    copied = home.copy_blob(first, home, f"{top}/copied")
    rewritten = home.blob(f"{top}/rewritten")
    token, done, size = rewritten.rewrite(first)
    composed = home.blob(f"{top}/composed")
    composed.compose([first, second])
    moved = home.move_blob(second, f"{top}/moved")
    listed = [blob.name for blob in client.list_blobs(bucket, prefix=f"{top}/", delimiter="/")]
    with client.batch():
        for blob in (first, copied, rewritten):
            blob.delete()
    return {
        "listed": [name.removeprefix(f"{top}/") for name in listed],
        "rewrite": [token, done, size],
        "composed": [composed.download_as_bytes(), composed.component_count, composed.md5_hash],
        "moved": moved.download_as_bytes(),
        "left": [
            blob.name.removeprefix(f"{top}/") for blob in client.list_blobs(bucket, prefix=top)
        ],
    }


def batch_with_a_missing_one(bucket: str, name: str) -> str:
    client = storage.Client()
    write(bucket, name, b"x")
    try:
        with client.batch():
            client.bucket(bucket).blob(name).delete()
            client.bucket(bucket).blob(f"{name}-missing").delete()
    except NotFound:
        return "not found"
    return "all done"


def buckets() -> list[str]:
    client = storage.Client()
    client.create_bucket("made-by-storage")
    found = [bucket.name for bucket in client.list_buckets(page_size=1)]
    client.get_bucket("made-by-storage").delete()
    return found
