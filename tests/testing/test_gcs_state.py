"""The state and the protocol, without HTTP: objects, uploads, listing, multipart, fault rules."""

from __future__ import annotations

import pytest
from fake_gcs.faults import FaultPlan, FaultRule, Throttles
from fake_gcs.listing import ListQuery, list_page
from fake_gcs.multipart import parse_upload, upload_attributes
from fake_gcs.resources import GcsError, Preconditions
from fake_gcs.store import GcsStore
from fake_gcs.uploads import CHUNK_BYTES, Uploads
from hypothesis import given, settings
from hypothesis import strategies as st


def new_store():
    # A clock that stands still, to show that generations do not need one that moves.
    return GcsStore(lambda: 1_700_000_000_000_000, ["bucket"])


def status_of(call, *args):
    with pytest.raises(GcsError) as caught:
        call(*args)
    return caught.value.status


def test_generations_rise_over_all_objects():
    store = new_store()
    generations = [store.put("bucket", name, b"").generation for name in ("a", "b", "a")]
    assert generations == sorted(set(generations))
    store.delete("bucket", "a")
    assert store.put("bucket", "a", b"").generation > generations[-1]


@pytest.mark.parametrize(
    ("conditions", "missing", "present"),
    [
        (Preconditions(generation_match=0), None, 412),
        (Preconditions(generation_match=5), 412, 412),
        (Preconditions(generation_not_match=0), 304, None),
        (Preconditions(generation_not_match=5), None, None),
    ],
)
def test_preconditions_of_a_write(conditions, missing, present):
    store = new_store()
    before = store.put("bucket", "present", b"old")
    for name, status in (("missing", missing), ("present", present)):
        if status is None:
            assert store.put("bucket", name, b"new", conditions).data == b"new"
        else:
            assert status_of(store.put, "bucket", name, b"new", conditions) == status
    if present is not None:
        assert store.get("bucket", "present") == before


def test_refused_deletion_changes_nothing():
    store = new_store()
    first = store.put("bucket", "a", b"one")
    assert status_of(store.delete, "bucket", "a", Preconditions(generation_match=1)) == 412
    assert store.get("bucket", "a") == first


SOME_BYTES = bytes(index * 31 % 256 for index in range(5 * CHUNK_BYTES))


@settings(deadline=None, max_examples=50)
@given(
    size=st.integers(0, 5 * CHUNK_BYTES),
    steps=st.lists(st.tuples(st.integers(-2, 1), st.integers(0, 3)), max_size=12),
)
def test_any_order_of_chunks_ends_in_the_same_bytes(size, steps):
    """Repeated, overlapping and too early chunks, then the rest: always the object, exactly."""
    data = SOME_BYTES[:size]
    uploads = Uploads(new_store())
    upload_id = uploads.start("bucket", "a", None, Preconditions())
    session = uploads.session(upload_id)
    for shift, chunks in steps:
        first = max(0, len(session.received) + shift * CHUNK_BYTES)
        part = data[first : first + chunks * CHUNK_BYTES]
        if not part or first + len(part) >= size:
            continue
        header = f"bytes {first}-{first + len(part) - 1}/*"
        assert uploads.receive(upload_id, header, part) is None
        assert bytes(session.received) == data[: len(session.received)]
    first = len(session.received)
    header = f"bytes {first}-{size - 1}/{size}" if first < size else f"bytes */{size}"
    stored = uploads.receive(upload_id, header, data[first:])
    assert stored is not None
    assert stored.data == data
    assert uploads.receive(upload_id, "bytes */*", b"") == stored


def test_chunk_that_is_no_multiple_counts_in_part():
    uploads = Uploads(new_store())
    upload_id = uploads.start("bucket", "a", None, Preconditions())
    data = b"x" * (CHUNK_BYTES + 100)
    assert uploads.receive(upload_id, f"bytes 0-{len(data) - 1}/*", data) is None
    assert len(uploads.session(upload_id).received) == CHUNK_BYTES


def test_conditions_of_an_upload_hold_at_both_ends():
    store = new_store()
    uploads = Uploads(store)
    create = Preconditions(generation_match=0)
    upload_id = uploads.start("bucket", "a", None, create)
    store.put("bucket", "a", b"somebody else's")
    assert status_of(uploads.start, "bucket", "a", None, create) == 412
    for _ in range(2):
        assert status_of(uploads.receive, upload_id, "bytes 0-3/4", b"mine") == 412
    assert store.get("bucket", "a").data == b"somebody else's"


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
            found.add((query.prefix + rest.split(query.delimiter)[0] + query.delimiter, True))
        else:
            found.add((name, False))
    return found


@settings(deadline=None)
@given(
    names=st.sets(short_names, max_size=30),
    query=st.fixed_dictionaries(
        {
            "prefix": st.text(alphabet="ab/", max_size=3),
            "delimiter": st.sampled_from(["", "/", "a/"]),
            "startOffset": st.text(alphabet="ab/", max_size=3),
            "endOffset": st.text(alphabet="ab/é", max_size=3),
            "maxResults": st.sampled_from("1234"),
        }
    ),
)
def test_pages_make_the_whole_listing(names, query):
    found, pages, token = [], 0, ""
    while token is not None:
        page = list_page(sorted(names), ListQuery.from_query({**query, "pageToken": token}))
        found += [(name, False) for name in page.names] + [(name, True) for name in page.prefixes]
        pages, token = pages + 1, page.next_page_token
    assert len(found) == len(set(found))
    assert set(found) == plain_listing(names, ListQuery.from_query(query))
    assert pages <= len(found) + 1


def test_filters_that_are_not_known_are_refused():
    for query in ({"matchGlob": "*"}, {"softDeleted": "true"}, {"maxResults": "-1"}):
        assert status_of(ListQuery.from_query, query) == 400
    assert ListQuery.from_query({"maxResults": "5000"}).max_results == 1000


@settings(deadline=None)
@given(data=st.binary(max_size=300), newline=st.sampled_from([b"\n", b"\r\n"]))
def test_multipart_keeps_any_bytes(data, newline):
    lines = [b"--==0==", b"Content-Type: application/json", b"", b'{"name": "x"}', b"--==0=="]
    body = newline.join([*lines, b"content-type: a/b", b"", data, b"--==0==--"])
    content_type = 'multipart/related; boundary="==0=="'
    upload = parse_upload(content_type, body)
    assert (upload.attributes, upload.content_type, upload.data) == ({"name": "x"}, "a/b", data)
    assert upload_attributes(content_type, body[:90]) == {"name": "x"}


def test_rules_skip_count_and_leave_the_rest_to_the_next():
    plan = FaultPlan()
    plan.add(FaultRule(kind="status", method="POST", skip=1, count=2))
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
        ({"method": "P*", "path": "*/o?uploadType=*"}, True),
        ({"method": "GET"}, False),
        ({"path": "/storage/*"}, False),
        ({"operation": "objects.*", "target": "bucket/a/*"}, True),
        ({"operation": "objects.*", "target": "bucket/b/*"}, False),
    ],
)
def test_rule_patterns(fields, matches):
    rule = FaultRule(kind="reset", **fields)
    path = "/upload/storage/v1/b/bucket/o?uploadType=media&name=a/12"
    assert rule.matches("POST", path, "objects.insert", "bucket/a/12") == matches


def test_throttled_requests_share_one_speed():
    one, other = (FaultRule(kind="throttle", bytes_per_s=100) for _ in range(2))
    throttles = Throttles()
    assert throttles.wait_s(one, 100, now_s=10.0) == 1.0
    assert throttles.wait_s(one, 50, now_s=10.0) == 1.5
    assert throttles.wait_s(other, 100, now_s=10.0) == 1.0
    assert throttles.wait_s(one, 100, now_s=20.0) == 0.75, "it makes up for a quarter of a second"
