"""The protocol, without HTTP: listing, multipart, routes, ranges, fault rules, log."""

from __future__ import annotations

import itertools

import pytest
from fake_gcs.faults import FaultPlan, FaultRule
from fake_gcs.listing import ListQuery, list_page
from fake_gcs.request_log import RequestLog, RequestRecord
from fake_gcs.resources import GcsError
from fake_gcs.rest.multipart import parse_upload, upload_attributes
from fake_gcs.rest.object_api import parse_range
from fake_gcs.rest.routes import find_route, split_target
from hypothesis import given, settings
from hypothesis import strategies as st


def status_of(call, *args, **kwargs):
    with pytest.raises(GcsError) as caught:
        call(*args, **kwargs)
    return caught.value.status


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
