"""The HTTP side: reads requests, applies faults, answers from the API, writes the log.

It runs on one event loop; a request is applied without an await, so the store needs no lock.
Connections are plain HTTP on the given address (by default 127.0.0.1).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from dataclasses import dataclass
from urllib.parse import unquote

from aiohttp import web

from fake_gcs.admin import ADMIN_PREFIX, Admin
from fake_gcs.api import GcsApi
from fake_gcs.faults import FaultPlan, FaultRule, Throttles
from fake_gcs.multipart import upload_attributes
from fake_gcs.request_log import RequestRecord
from fake_gcs.resources import GcsError
from fake_gcs.routes import (
    ApiReply,
    ApiRequest,
    Route,
    find_route,
    split_target,
)
from fake_gcs.store import GcsStore

_HEAD_BYTES = 64 * 1024  # contains the name in the JSON part of an upload
_SLICE_BYTES = 1 << 20
_TRICKLE_STEP_S = 0.05
_STOP_S = 1.0


@dataclass(slots=True)
class _Exchange:
    """One request in progress, and its fields for the log."""

    http: web.BaseRequest
    raw_path: str
    query: dict[str, str]
    operation: str = "unknown"
    target: str = ""
    rule: FaultRule | None = None
    status: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0


class GcsServer:
    """One server on the running event loop. Call ``start`` and ``stop`` on that loop only."""

    def __init__(self, buckets: list[str]) -> None:
        self._api = GcsApi(GcsStore(lambda: time.time_ns() // 1000, buckets))
        self._faults = FaultPlan()
        self._log: list[RequestRecord] = []
        self._throttles = Throttles()
        self._admin = Admin(self._api, self._faults, self._log)
        self._runner: web.ServerRunner | None = None

    async def start(self) -> str:
        """Listen on a free port and return the URL."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        server = web.Server(self._serve, access_log=None, auto_decompress=False)
        self._runner = web.ServerRunner(server, shutdown_timeout=_STOP_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=512).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Stop listening and end all connections, within about a second."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        raw_path, query = split_target(http.raw_path)
        exchange = _Exchange(http, raw_path, query)
        if raw_path.startswith(ADMIN_PREFIX):
            body = await self._read_body(exchange, b"", None)
            reply = self._admin.handle(self._request(exchange, body))
            return await self._send(exchange, reply, None)
        began_s, began = time.time(), time.monotonic()
        try:
            return await self._exchange(exchange)
        except ConnectionError:
            _abort(http)
            return web.Response()
        finally:
            self._log.append(_record(exchange, began_s, time.monotonic() - began))

    async def _exchange(self, exchange: _Exchange) -> web.StreamResponse:
        http = exchange.http
        head = await self._read_head(exchange)
        self._identify(exchange, head)
        rule = exchange.rule = self._faults.pick(
            http.method, _decoded(http.raw_path), exchange.operation, exchange.target
        )
        if rule is not None and rule.delay_s > 0:
            await asyncio.sleep(rule.delay_s)
        while rule is not None and rule.kind == "hold" and self._faults.in_force(rule):
            await asyncio.sleep(_TRICKLE_STEP_S)
        if rule is not None and rule.kind == "reset" and rule.after_bytes is None:
            _abort(http)
            return web.Response()
        body = await self._read_body(exchange, head, rule)
        if rule is not None and rule.kind == "status":
            error = GcsError(rule.status_code, "injected", "Injected by a fault rule.")
            return await self._send(exchange, ApiReply.refusal(error), None)
        reply = self._api.handle(self._request(exchange, body))
        if rule is not None and rule.kind == "lose_reply":
            _abort(http)
            return web.Response()
        return await self._send(exchange, reply, rule)

    def _identify(self, exchange: _Exchange, head: bytes) -> None:
        """Set operation and target. An invalid request stays ``unknown``: the API refuses it."""
        try:
            route = find_route(exchange.http.method, exchange.raw_path, exchange.query)
            exchange.operation = route.operation
            exchange.target = f"{route.bucket}/{self._object_name(exchange, route, head)}"
        except GcsError:
            exchange.target = exchange.target or "/"

    def _object_name(self, exchange: _Exchange, route: Route, head: bytes) -> str:
        if route.name:
            return route.name
        if route.operation == "uploads.chunk":
            return self._api.uploads.session(exchange.query["upload_id"]).name
        if "name" in exchange.query:
            return exchange.query["name"]
        if route.operation == "uploads.start":
            return str(self._request(exchange, head).json().get("name", ""))
        if exchange.query.get("uploadType") == "multipart":
            content_type = exchange.http.headers.get("Content-Type", "")
            return str(upload_attributes(content_type, head).get("name", ""))
        return ""

    def _request(self, exchange: _Exchange, body: bytes) -> ApiRequest:
        headers = {key.lower(): value for key, value in exchange.http.headers.items()}
        base_url = f"http://{exchange.http.host}"
        return ApiRequest(
            exchange.http.method, exchange.raw_path, exchange.query, headers, body, base_url
        )

    async def _read_head(self, exchange: _Exchange) -> bytes:
        http = exchange.http
        if http.headers.get("Expect", "").lower() == "100-continue":
            await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            http.writer.output_size = 0
        if not http.can_read_body:
            return b""
        head = bytearray()
        while len(head) < _HEAD_BYTES:
            data = await self._read_some(exchange, _HEAD_BYTES - len(head))
            if not data:
                break
            head += data
        return bytes(head)

    async def _read_body(self, exchange: _Exchange, head: bytes, rule: FaultRule | None) -> bytes:
        """Return ``head`` and the rest of the body, read slowly when the rule trickles."""
        if not exchange.http.can_read_body:
            return head
        step = _SLICE_BYTES
        if rule is not None and rule.is_slow:
            step = _trickle_bytes(rule)
            await self._trickle(rule, len(head))
        body = bytearray(head)
        while data := await self._read_some(exchange, step):
            body += data
            if rule is not None and rule.is_slow:
                await self._trickle(rule, len(data))
        return bytes(body)

    async def _trickle(self, rule: FaultRule, count: int) -> None:
        """Wait for the time of ``count`` bytes under ``rule``, or until it is removed."""
        if rule.kind == "throttle":
            left_s = self._throttles.wait_s(rule, count, time.monotonic())
        else:
            left_s = count / rule.bytes_per_s
        end_s = time.monotonic() + left_s
        while (left_s := end_s - time.monotonic()) > 0 and self._faults.in_force(rule):
            await asyncio.sleep(min(left_s, _TRICKLE_STEP_S))

    async def _read_some(self, exchange: _Exchange, count: int) -> bytes:
        data = await exchange.http.content.read(count)
        exchange.bytes_in += len(data)
        return data

    async def _send(
        self, exchange: _Exchange, reply: ApiReply, rule: FaultRule | None
    ) -> web.StreamResponse:
        http = exchange.http
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        if reply.status not in (204, 304):
            response.content_length = len(reply.body)
        await response.prepare(http)
        exchange.status = reply.status
        body = reply.body
        if rule is not None and rule.kind == "flip":
            body = _flipped(body)
        view = memoryview(body)
        end, step = len(view), _SLICE_BYTES
        if rule is not None and rule.kind in ("truncate", "reset"):
            end = min(end, rule.after_bytes or 0)
        if rule is not None and rule.is_slow:
            step = _trickle_bytes(rule)
        for start in range(0, end, step):
            piece = view[start : min(start + step, end)]
            await response.write(piece)
            exchange.bytes_out += len(piece)
            if rule is not None and rule.is_slow:
                await self._trickle(rule, len(piece))
        if end < len(view):
            await self._cut(http, response, hard=rule is not None and rule.kind == "reset")
        return response

    async def _cut(
        self, http: web.BaseRequest, response: web.StreamResponse, *, hard: bool
    ) -> None:
        """End the connection during the reply, after the written bytes have left this process."""
        await response.drain()
        if hard:
            # A reset discards unread bytes, so the client gets time to read.
            await asyncio.sleep(_TRICKLE_STEP_S)
            _abort(http)
        elif http.transport is not None:
            http.transport.close()


def _flipped(body: bytes | memoryview) -> bytes:
    """Return the body with one other bit in its middle."""
    data = bytearray(body)
    if data:
        data[len(data) // 2] ^= 1
    return bytes(data)


def _abort(http: web.BaseRequest) -> None:
    """End the connection with a TCP reset, like a failing frontend."""
    if http.transport is None:
        return
    connection = http.transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    http.transport.abort()


def _trickle_bytes(rule: FaultRule) -> int:
    return max(1, min(_SLICE_BYTES, int(rule.bytes_per_s * _TRICKLE_STEP_S)))


def _decoded(raw_target: str) -> str:
    path, mark, query = raw_target.partition("?")
    return unquote(path) + mark + unquote(query.replace("+", " "))


def _record(exchange: _Exchange, began_s: float, seconds: float) -> RequestRecord:
    http = exchange.http
    asked = http.headers.get("Range") or http.headers.get("Content-Range") or ""
    return RequestRecord(
        time_s=began_s,
        seconds=seconds,
        method=http.method,
        path=_decoded(http.raw_path),
        operation=exchange.operation,
        target=exchange.target,
        status=exchange.status,
        bytes_in=exchange.bytes_in,
        bytes_out=exchange.bytes_out,
        range_header=asked,
        fault=exchange.rule.kind if exchange.rule is not None else None,
    )
