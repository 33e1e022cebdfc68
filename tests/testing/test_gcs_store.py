"""The pure parts: store, listing, uploads, multipart, routes, fault rules, log."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emergency_ckpt.testing.gcs.faults import FaultPlan, FaultRule
from emergency_ckpt.testing.gcs.listing import ListQuery, list_page
from emergency_ckpt.testing.gcs.multipart import parse_upload, upload_attributes
from emergency_ckpt.testing.gcs.object_api import parse_range
from emergency_ckpt.testing.gcs.request_log import RequestLog, RequestRecord
from emergency_ckpt.testing.gcs.resources import GcsError, Limits, Preconditions
from emergency_ckpt.testing.gcs.routes import find_route, split_target
from emergency_ckpt.testing.gcs.store import ComposeSource, GcsStore
from emergency_ckpt.testing.gcs.uploads import CHUNK_BYTES, Uploads


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


# Listing

short_names = st.text(alphabet="ab/é\U0010ffff", min_size=1, max_size=5)


def plain_listing(names, query):
    """What the reference says, said slowly: filter, then fold at the delimiter."""
    found = set()
    for name in names:
        if not name.startswith(query.prefix) or name < query.start_offset:
            continue
        if query.end_offset and name >= query.end_offset:
            continue
        rest = name[len(query.prefix) :]
        if query.delimiter and query.delimiter in rest:
            folder = query.prefix + rest.split(query.delimiter)[0] + query.delimiter
            found.add((folder, True))
            if query.include_trailing_delimiter and name == folder:
                found.add((name, False))
        else:
            found.add((name, False))
    return found


@settings(deadline=None)
@given(
    names=st.sets(short_names, max_size=30),
    prefix=st.text(alphabet="ab/", max_size=3),
    delimiter=st.sampled_from(["", "/", "a/"]),
    start=st.text(alphabet="ab/", max_size=3),
    end=st.text(alphabet="ab/é", max_size=3),
    trailing=st.booleans(),
    size=st.integers(1, 4),
)
def test_pages_make_the_whole_listing(names, prefix, delimiter, start, end, trailing, size):
    after, found, pages = "", [], 0
    while True:
        query = ListQuery(
            prefix=prefix,
            delimiter=delimiter,
            start_offset=start,
            end_offset=end,
            include_trailing_delimiter=trailing,
            max_results=size,
            after=after,
        )
        page = list_page(sorted(names), query)
        found += [(name, False) for name in page.names] + [(name, True) for name in page.prefixes]
        pages += 1
        if page.next_page_token is None:
            break
        after = ListQuery.from_query({"pageToken": page.next_page_token}).after
    assert len(found) == len(set(found))
    assert set(found) == plain_listing(names, query)
    assert pages <= len(found) + 1


def test_filters_that_are_not_known_are_refused():
    for query in ({"matchGlob": "*"}, {"softDeleted": "true"}, {"pageToken": "%"}):
        assert status_of(ListQuery.from_query, query) == 400
    assert status_of(ListQuery.from_query, {"maxResults": "-1"}) == 400
    assert ListQuery.from_query({"maxResults": "5000"}).max_results == 1000


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
    assert uploads.receive(upload_id, "bytes */*", b"", None) == stored


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


def test_sessions_end():
    uploads = Uploads(new_store(uploads=2))
    ids = [uploads.start("bucket", "a", {}, Preconditions(), None) for _ in range(2)]
    assert status_of(uploads.start, "bucket", "a", {}, Preconditions(), None) == 507
    uploads.receive(ids[0], None, b"", None)
    uploads.start("bucket", "a", {}, Preconditions(), None)
    uploads.cancel(ids[1])
    for upload_id in ids:
        assert status_of(uploads.receive, upload_id, "bytes */*", b"", None) == 404


# Multipart, routes, ranges


@settings(deadline=None)
@given(data=st.binary(max_size=300), newline=st.sampled_from([b"\n", b"\r\n"]))
def test_multipart_keeps_any_bytes(data, newline):
    lines = [b"--==0==", b"Content-Type: application/json", b"", b'{"name": "x"}', b"--==0=="]
    body = newline.join([*lines, b"content-type: a/b", b"", data, b"--==0==--"])
    content_type = 'multipart/related; boundary="==0=="'
    upload = parse_upload(content_type, body)
    assert (upload.attributes, upload.content_type, upload.data) == ({"name": "x"}, "a/b", data)
    assert upload_attributes(content_type, body[:90]) == {"name": "x"}


@pytest.mark.parametrize(
    "body", [b"", b"--b", b"--b\r\n\r\n{}\r\n--b--", b"--b\n\n[]\n--b\n\nx\n--b--"]
)
def test_bad_multipart_is_refused(body):
    assert status_of(parse_upload, "multipart/related; boundary=b", body) == 400
    assert status_of(parse_upload, "multipart/related", body) == 400


@pytest.mark.parametrize(
    ("method", "target", "operation", "name"),
    [
        ("GET", "/storage/v1/b/x/o/a%2Fb%20c%2B", "objects.get", "a/b c+"),
        ("GET", "/storage/v1/b/x/o/a?alt=media", "objects.media", "a"),
        ("GET", "/download/storage/v1/b/x/o/%2Fa%252F?alt=media", "objects.media", "/a%2F"),
        ("GET", "/x/a/b%20c", "objects.media", "a/b c"),
        ("POST", "/upload/storage/v1/b/x/o?uploadType=media", "objects.insert", ""),
        ("POST", "/upload/storage/v1/b/x/o?uploadType=resumable", "uploads.start", ""),
        ("PUT", "/upload/storage/v1/b/x/o?upload_id=1", "uploads.chunk", ""),
        ("POST", "/storage/v1/b/x/o/a%2Fb/moveTo/o/c%2Fd", "objects.move", "a/b"),
        ("POST", "/batch/storage/v1", "batch", ""),
    ],
)
def test_routes(method, target, operation, name):
    route = find_route(method, *split_target(target))
    assert (route.operation, route.name) == (operation, name)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/storage/v1/b/x/o/a", 405),
        ("GET", "/storage/v1/b/x/o/%FF", 400),
        ("GET", "/", 404),
        ("GET", "/storage", 404),
    ],
)
def test_unknown_routes(method, path, status):
    assert status_of(find_route, method, path, {}) == status


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("bytes=2-5", (2, 6)),
        ("bytes=2-", (2, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-30", (0, 10)),
        ("bytes=8-100", (8, 10)),
        ("bytes=10-", (10, 10)),
        ("bytes=-0", (10, 10)),
        ("bytes=5-2", None),
        ("bytes=-", None),
        ("bytes=0-1,4-5", None),
        ("", None),
    ],
)
def test_ranges(header, wanted):
    assert parse_range(header, 10) == wanted


# Faults and log


def test_rules_skip_count_and_leave_the_rest_to_the_next():
    plan = FaultPlan(limit=2)
    first = FaultRule(kind="status", method="POST", skip=1, count=2)
    plan.add(first)
    plan.add(FaultRule(kind="delay", target="b/x*", count=3))
    picked = [plan.pick("POST", "/p", "objects.insert", "b/x1") for _ in range(6)]
    assert [item and item.kind for item in picked] == [
        "delay", "status", "status", "delay", "delay", None,
    ]  # fmt: skip
    assert [(state.matched, state.hit) for state in plan.states()] == [(3, 2), (3, 3)]
    assert plan.pick("GET", "/p", "objects.insert", "b/y") is None


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({"method": "P*"}, True),
        ({"method": "GET"}, False),
        ({"path": "*/o?uploadType=*"}, True),
        ({"path": "/storage/*"}, False),
        ({"path_regex": r"name=(a|b)/\d+$"}, True),
        ({"path_regex": r"name=c"}, False),
        ({"operation": "objects.*", "target": "bucket/a/*"}, True),
        ({"operation": "objects.*", "target": "bucket/b/*"}, False),
    ],
)
def test_rule_patterns(fields, matches):
    rule = FaultRule(kind="reset", **fields)
    path = "/upload/storage/v1/b/bucket/o?uploadType=media&name=a/12"
    assert rule.matches("POST", path, "objects.insert", "bucket/a/12") == matches


def test_rules_are_bounded_and_checked():
    plan = FaultPlan(limit=1)
    assert status_of(plan.add, FaultRule(kind="status", path_regex="(")) == 400
    rule_id = plan.add(FaultRule(kind="status"))
    assert status_of(plan.add, FaultRule(kind="status")) == 507
    plan.remove(rule_id)
    assert status_of(plan.remove, rule_id) == 404


def test_log_keeps_the_newest():
    log = RequestLog(limit=3)
    for index in itertools.repeat(0, 5):
        log.append(
            RequestRecord(
                index=index, time_s=0, seconds=0, method="GET", path="", operation="", target="",
                status=200, bytes_in=0, bytes_out=0, range_header="", client="", user_agent="",
                fault=None,
            )
        )  # fmt: skip
    assert [record.index for record in log.page(0, 10)] == [2, 3, 4]
    assert [record.index for record in log.page(3, 1)] == [3]
    log.clear()
    assert log.page(0, 10) == []
