"""The control interface: faults, the request log and objects, for tests in any process.

Requests under ``/_fake`` get no faults and are not logged. The rest of a path after ``/_fake/api``
is an ordinary API path. Pure.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from fake_gcs.faults import FaultPlan, FaultRule, FaultState
from fake_gcs.request_log import RequestLog, RequestRecord
from fake_gcs.resources import GcsError, whole_number
from fake_gcs.rest.api import GcsApi
from fake_gcs.rest.routes import ApiReply, ApiRequest

ADMIN_PREFIX = "/_fake/"
API_PREFIX = "/_fake/api"
LOG_PAGE = 5000


class LogPage(msgspec.Struct, frozen=True):
    """A part of the log; the next one begins at the last index + 1, unless ``records`` is empty."""

    records: list[RequestRecord]


class RuleAdded(msgspec.Struct, frozen=True):
    rule_id: int


class FaultStates(msgspec.Struct, frozen=True):
    rules: list[FaultState]


class Admin:
    """Answers the requests under ``/_fake/``."""

    def __init__(self, api: GcsApi, faults: FaultPlan, log: RequestLog) -> None:
        self._api = api
        self._faults = faults
        self._log = log

    def handle(self, request: ApiRequest) -> ApiReply:
        if request.path.startswith(API_PREFIX):
            return self._api.handle(replace(request, path=request.path[len(API_PREFIX) :]))
        try:
            return self._handle(request)
        except GcsError as error:
            return ApiReply.refusal(error)

    def _handle(self, request: ApiRequest) -> ApiReply:
        match request.method, request.path.removeprefix(ADMIN_PREFIX):
            case "GET", "requests":
                since = whole_number(request.query, "since") or 0
                return ApiReply.json(LogPage(self._log.page(since, LOG_PAGE)))
            case "DELETE", "requests":
                self._log.clear()
            case "GET", "faults":
                return ApiReply.json(FaultStates(self._faults.states()))
            case "POST", "faults":
                return ApiReply.json(RuleAdded(self._faults.add(_rule(request.body))))
            case "DELETE", "faults":
                rule_id = whole_number(request.query, "rule_id")
                if rule_id is None:
                    self._faults.clear()
                else:
                    self._faults.remove(rule_id)
            case _:
                raise GcsError(404, "notFound", "No such address under /_fake/.")
        return ApiReply(204)


def _rule(body: bytes) -> FaultRule:
    try:
        return msgspec.json.decode(body, type=FaultRule)
    except msgspec.DecodeError as error:
        raise GcsError(400, "parseError", f"Not a fault rule: {error}") from error
