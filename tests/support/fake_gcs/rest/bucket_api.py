"""The requests about buckets."""

from __future__ import annotations

from fake_gcs.listing import ListQuery, list_page
from fake_gcs.resources import GcsError, bucket_resource
from fake_gcs.rest.routes import ApiReply, ApiRequest, Route
from fake_gcs.store import GcsStore


def list_buckets(store: GcsStore, _route: Route, request: ApiRequest) -> ApiReply:
    page = list_page(
        [bucket.name for bucket in store.buckets()], ListQuery.from_query(request.query)
    )
    items = [bucket_resource(store.bucket(name), request.base_url) for name in page.names]
    reply: dict[str, object] = {"kind": "storage#buckets", "items": items}
    if page.next_page_token is not None:
        reply["nextPageToken"] = page.next_page_token
    return ApiReply.json(reply)


def insert(store: GcsStore, _route: Route, request: ApiRequest) -> ApiReply:
    attributes = request.json()
    name = attributes.get("name")
    if not isinstance(name, str):
        raise GcsError(400, "required", "A bucket needs a name.")
    return ApiReply.json(bucket_resource(store.create_bucket(name, attributes), request.base_url))


def get(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    return ApiReply.json(bucket_resource(store.bucket(route.bucket), request.base_url))


def patch(store: GcsStore, route: Route, request: ApiRequest) -> ApiReply:
    bucket = store.patch_bucket(route.bucket, request.json())
    return ApiReply.json(bucket_resource(bucket, request.base_url))


def delete(store: GcsStore, route: Route, _request: ApiRequest) -> ApiReply:
    store.delete_bucket(route.bucket)
    return ApiReply(204)


def layout(store: GcsStore, route: Route, _request: ApiRequest) -> ApiReply:
    bucket = store.bucket(route.bucket)
    return ApiReply.json(
        {
            "kind": "storage#storageLayout",
            "bucket": bucket.name,
            "location": "US-CENTRAL1",
            "locationType": "region",
            "hierarchicalNamespace": {"enabled": False},
        }
    )
