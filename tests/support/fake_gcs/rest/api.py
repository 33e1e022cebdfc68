"""The JSON API on a store: one request in, one reply out. Pure; does not block.

Each request is applied or refused as a whole, in one call, so preconditions are atomic. ``fields``,
``projection``, ACLs, ``userProject`` and authorization are accepted and ignored: every field is
returned and every operation is allowed.
"""

from __future__ import annotations

from collections.abc import Callable

from fake_gcs.resources import GcsError
from fake_gcs.rest import bucket_api, object_api, upload_api
from fake_gcs.rest.multipart import BatchPart, batch_reply, parse_batch
from fake_gcs.rest.routes import (
    ApiReply,
    ApiRequest,
    Route,
    find_route,
    split_target,
)
from fake_gcs.store import GcsStore
from fake_gcs.uploads import Uploads

_StoreHandler = Callable[[GcsStore, Route, ApiRequest], ApiReply]
_UploadHandler = Callable[[Uploads, Route, ApiRequest], ApiReply]


class GcsApi:
    """Answers every request of the JSON API, and reads of the XML API, from one store."""

    def __init__(self, store: GcsStore) -> None:
        self.store = store
        self.uploads = Uploads(store)

    def handle(self, request: ApiRequest) -> ApiReply:
        """Return the reply to one request, also a refusal. No request makes it raise."""
        try:
            route = find_route(request.method, request.path, request.query)
            if route.operation == "batch":
                return self._batch(request)
            in_store = _STORE_HANDLERS.get(route.operation)
            if in_store is not None:
                return in_store(self.store, route, request)
            return _UPLOAD_HANDLERS[route.operation](self.uploads, route, request)
        except GcsError as error:
            return ApiReply.refusal(error)

    def _batch(self, request: ApiRequest) -> ApiReply:
        content_type = request.headers.get("content-type", "")
        parts = parse_batch(content_type, request.body, self.store.limits.batch_parts)
        return batch_reply([(part, self._part(part, request.base_url)) for part in parts])

    def _part(self, part: BatchPart, base_url: str) -> ApiReply:
        path, query = split_target(part.target)
        if path.startswith(("/batch", "/upload", "/download")):
            error = GcsError(400, "invalid", "Uploads, media and batches cannot be batched.")
            return ApiReply.refusal(error)
        return self.handle(ApiRequest(part.method, path, query, part.headers, part.body, base_url))


_STORE_HANDLERS: dict[str, _StoreHandler] = {
    "buckets.list": bucket_api.list_buckets,
    "buckets.insert": bucket_api.insert,
    "buckets.get": bucket_api.get,
    "buckets.patch": bucket_api.patch,
    "buckets.delete": bucket_api.delete,
    "buckets.layout": bucket_api.layout,
    "objects.list": object_api.list_objects,
    "objects.get": object_api.get,
    "objects.media": object_api.media,
    "objects.delete": object_api.delete,
    "objects.patch": object_api.patch,
    "objects.update": object_api.update,
    "objects.compose": object_api.compose,
    "objects.copy": object_api.copy,
    "objects.rewrite": object_api.rewrite,
    "objects.move": object_api.move,
    "objects.insert": upload_api.insert,
}
_UPLOAD_HANDLERS: dict[str, _UploadHandler] = {
    "uploads.start": upload_api.start,
    "uploads.chunk": upload_api.chunk,
    "uploads.cancel": upload_api.cancel,
}
