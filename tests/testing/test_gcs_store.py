"""The state, without HTTP: store and resumable uploads."""

from __future__ import annotations

import dataclasses

import pytest
from fake_gcs.resources import GcsError, Limits, Preconditions
from fake_gcs.store import ComposeSource, GcsStore
from fake_gcs.uploads import CHUNK_BYTES, Uploads
from hypothesis import given, settings
from hypothesis import strategies as st


def new_store(**limits):
    # A clock that stands still, to show that generations do not need one that moves.
    store = GcsStore(lambda: 1_700_000_000_000_000, Limits(**limits))
    store.create_bucket("bucket", {})
    return store


def status_of(call, *args, **kwargs):
    with pytest.raises(GcsError) as caught:
        call(*args, **kwargs)
    return caught.value.status


# Store


def test_generations_rise_over_all_objects():
    store = new_store()
    stored = [store.put("bucket", name, b"", {}) for name in ("a", "b", "a")]
    generations = [item.generation for item in stored]
    assert generations == sorted(set(generations))
    store.delete("bucket", "a")
    assert store.put("bucket", "a", b"", {}).generation > generations[-1]


@pytest.mark.parametrize(
    ("conditions", "missing", "present"),
    [
        (Preconditions(generation_match=0), 200, 412),
        (Preconditions(generation_match=5), 412, 412),
        (Preconditions(generation_not_match=0), 304, 200),
        (Preconditions(generation_not_match=5), 200, 200),
        (Preconditions(metageneration_match=1), 412, 200),
        (Preconditions(metageneration_not_match=1), 200, 304),
        (Preconditions(), 200, 200),
    ],
)
def test_preconditions_of_a_write(conditions, missing, present):
    store = new_store()
    for wanted in (missing, present):
        if wanted == 200:
            store.put("bucket", "a", b"new", {}, conditions)
        else:
            assert status_of(store.put, "bucket", "a", b"new", {}, conditions) == wanted
        if store.find("bucket", "a") is None:
            store.put("bucket", "a", b"old", {})


def test_refused_write_changes_nothing():
    store = new_store()
    first = store.put("bucket", "a", b"one", {"contentType": "x/y"})
    status_of(store.put, "bucket", "a", b"two", {}, Preconditions(generation_match=0))
    status_of(store.delete, "bucket", "a", None, Preconditions(generation_match=1))
    assert store.get("bucket", "a") == first


def test_patch_keeps_the_generation_and_merges():
    store = new_store()
    first = store.put("bucket", "a", b"", {"metadata": {"x": "1", "y": "2"}, "size": "9"})
    second = store.patch("bucket", "a", {"metadata": {"x": None, "z": "3"}, "name": "other"})
    assert second.attributes == {"metadata": {"y": "2", "z": "3"}}
    assert (second.generation, second.metageneration) == (first.generation, 2)


def test_old_generation_is_gone():
    store = new_store()
    first = store.put("bucket", "a", b"one", {})
    store.put("bucket", "a", b"two", {})
    assert status_of(store.get, "bucket", "a", first.generation) == 404


def test_compose_checks_its_sources_and_has_no_md5():
    store = new_store()
    part = store.put("bucket", "p", b"ab", {})
    whole = store.compose("bucket", "w", [ComposeSource("p"), ComposeSource("p")], {})
    assert (whole.data, whole.digests.md5, whole.component_count) == (b"abab", None, 2)
    stale = ComposeSource("p", generation_match=part.generation + 1)
    assert status_of(store.compose, "bucket", "w", [stale], {}) == 412
    assert status_of(store.compose, "bucket", "w", [ComposeSource("p")] * 33, {}) == 400
    assert status_of(store.compose, "bucket", "w", [ComposeSource("no")], {}) == 404


def test_limits_are_refusals_and_freed_room_counts():
    store = new_store(object_bytes=10, total_bytes=16, objects=2, buckets=1)
    assert status_of(store.create_bucket, "second", {}) == 507
    assert status_of(store.put, "bucket", "a", b"x" * 11, {}) == 413
    store.put("bucket", "a", b"x" * 10, {})
    assert status_of(store.put, "bucket", "b", b"x" * 7, {}) == 507
    store.put("bucket", "a", b"x" * 9, {})
    store.put("bucket", "b", b"x" * 7, {})
    assert status_of(store.put, "bucket", "c", b"", {}) == 507
    store.delete("bucket", "b")
    assert store.total_bytes == 9


@pytest.mark.parametrize("name", ["", ".", "..", "a\nb", "a\rb", "é" * 513])
def test_names_that_gcs_refuses(name):
    assert status_of(new_store().put, "bucket", name, b"", {}) == 400


def test_buckets():
    store = new_store()
    assert status_of(store.create_bucket, "bucket", {}) == 409
    assert status_of(store.create_bucket, "Bad_Name!", {}) == 400
    assert status_of(store.bucket, "missing") == 404
    store.put("bucket", "a", b"", {})
    assert status_of(store.delete_bucket, "bucket") == 409
    store.delete("bucket", "a")
    store.delete_bucket("bucket")
    assert store.buckets() == []


# Resumable uploads


SOME_BYTES = bytes(index * 31 % 256 for index in range(5 * CHUNK_BYTES))


@settings(deadline=None, max_examples=50)
@given(
    size=st.integers(0, 5 * CHUNK_BYTES),
    steps=st.lists(st.tuples(st.integers(-2, 1), st.integers(0, 3)), max_size=12),
    total_known=st.booleans(),
)
def test_any_order_of_chunks_ends_in_the_same_bytes(size, steps, total_known):
    """Repeated, overlapping and too early chunks, then the rest: always the object, exactly."""
    data = SOME_BYTES[:size]
    store = new_store()
    uploads = Uploads(store)
    upload_id = uploads.start("bucket", "a", {}, Preconditions(), size if total_known else None)
    session = uploads.session(upload_id)
    for shift, chunks in steps:
        first = max(0, len(session.received) + shift * CHUNK_BYTES)
        part = data[first : first + chunks * CHUNK_BYTES]
        if not part or first + len(part) >= size or session.stored is not None:
            continue
        header = f"bytes {first}-{first + len(part) - 1}/*"
        assert uploads.receive(upload_id, header, part, None) is None
        assert bytes(session.received) == data[: len(session.received)]
    first = len(session.received)
    header = f"bytes {first}-{size - 1}/{size}" if first < size else f"bytes */{size}"
    stored = uploads.receive(upload_id, header, data[first:], None)
    assert stored is not None
    assert stored.data == data
    again = uploads.receive(upload_id, "bytes */*", b"", None)
    assert again == dataclasses.replace(stored, data=b"")


def test_chunk_that_is_no_multiple_counts_in_part():
    uploads = Uploads(new_store())
    upload_id = uploads.start("bucket", "a", {}, Preconditions(), None)
    data = b"x" * (CHUNK_BYTES + 100)
    assert uploads.receive(upload_id, f"bytes 0-{len(data) - 1}/*", data, None) is None
    assert len(uploads.session(upload_id).received) == CHUNK_BYTES


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ("bytes 0-9/5", b"x" * 10),
        ("bytes 0-9/*", b"x" * 9),
        ("bytes */*", b"x"),
        ("bytes 0-/10", b""),
        ("items 0-1/2", b"xx"),
        ("bytes 0-1/9", b"xx"),
    ],
)
def test_bad_chunks_are_refused(header, data):
    uploads = Uploads(new_store())
    upload_id = uploads.start("bucket", "a", {}, Preconditions(), 1 << 20)
    assert status_of(uploads.receive, upload_id, header, data, None) == 400


def test_conditions_of_an_upload_hold_at_both_ends():
    store = new_store()
    uploads = Uploads(store)
    create = Preconditions(generation_match=0)
    upload_id = uploads.start("bucket", "a", {}, create, None)
    store.put("bucket", "a", b"somebody else's", {})
    assert status_of(uploads.start, "bucket", "a", {}, create, None) == 412
    for _ in range(2):
        assert status_of(uploads.receive, upload_id, None, b"mine", None) == 412
    assert store.get("bucket", "a").data == b"somebody else's"


def test_upload_with_another_digest_is_refused():
    uploads = Uploads(new_store())
    upload_id = uploads.start("bucket", "a", {}, Preconditions(), None)
    assert status_of(uploads.receive, upload_id, None, b"data", "crc32c=AAAAAA==") == 400


def test_open_uploads_count_against_the_total():
    store = new_store(total_bytes=3 * CHUNK_BYTES)
    uploads = Uploads(store)
    chunk, header = bytes(2 * CHUNK_BYTES), f"bytes 0-{2 * CHUNK_BYTES - 1}/*"
    ids = [uploads.start("bucket", "a", {}, Preconditions(), None) for _ in range(2)]
    uploads.receive(ids[0], header, chunk, None)
    assert status_of(uploads.receive, ids[1], header, chunk, None) == 507
    uploads.cancel(ids[0])
    uploads.receive(ids[1], header, chunk, None)
    assert uploads.receive(ids[1], f"bytes */{2 * CHUNK_BYTES}", b"", None) is not None
    assert store.total_bytes == 2 * CHUNK_BYTES


def test_sessions_end():
    uploads = Uploads(new_store(uploads=2))
    ids = [uploads.start("bucket", "a", {}, Preconditions(), None) for _ in range(2)]
    assert status_of(uploads.start, "bucket", "a", {}, Preconditions(), None) == 507
    uploads.receive(ids[0], None, b"", None)
    uploads.start("bucket", "a", {}, Preconditions(), None)
    uploads.cancel(ids[1])
    for upload_id in ids:
        assert status_of(uploads.receive, upload_id, "bytes */*", b"", None) == 404
