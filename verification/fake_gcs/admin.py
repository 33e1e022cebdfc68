"""The control interface: faults, the request log and objects, for tests in any process.

Requests under ``/_fake`` get no faults and are not logged. The rest of a path after ``/_fake/api``
is an ordinary API path. Pure.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from fake_gcs.api import GcsApi
from fake_gcs.faults import FaultPlan, FaultRule
from fake_gcs.request_log import RequestRecord
from fake_gcs.resources import GcsError, whole_number
from fake_gcs.routes import ApiReply, ApiRequest

ADMIN_PREFIX = "/_fake/"
API_PREFIX = "/_fake/api"


class Admin:
    """Answers the requests under ``/_fake/``."""

    def __init__(self, api: GcsApi, faults: FaultPlan, log: list[RequestRecord]) -> None:
        self._api = api
        self._faults = faults
        self._log = log

    def handle(self, request: ApiRequest) -> ApiReply:
        if request.path.startswith(API_PREFIX):
            return self._api.handle(replace(request, path=request.path[len(API_PREFIX) :]))
        try:
            return self._handle(request)
        except (GcsError, msgspec.DecodeError) as error:
            return ApiReply.json(str(error), 400)

    def _handle(self, request: ApiRequest) -> ApiReply:
        match request.method, request.path.removeprefix(ADMIN_PREFIX):
            case "GET", "requests":
                return ApiReply.json(self._log)
            case "DELETE", "requests":
                self._log.clear()
            case "GET", "faults":
                return ApiReply.json(self._faults.states())
            case "POST", "faults":
                rule = msgspec.json.decode(request.body, type=FaultRule)
                return ApiReply.json(self._faults.add(rule))
            case "DELETE", "faults":
                rule_id = whole_number(request.query, "rule_id")
                if rule_id is None:
                    self._faults.clear()
                else:
                    self._faults.remove(rule_id)
            case "GET", "objects":
                bucket, prefix = request.query["bucket"], request.query["prefix"]
                return ApiReply.json(self._api.objects_below(bucket, prefix))
            case "POST", "objects":
                objects = msgspec.json.decode(request.body, type=dict[str, bytes])
                self._api.put_objects(request.query["bucket"], objects)
            case "DELETE", "objects":
                self._api.delete_below(request.query["bucket"], request.query["prefix"])
            case _:
                raise GcsError(404, "notFound", "No such address under /_fake/.")
        return ApiReply(204)
