"""One connection after its handshake: answer requests until the client leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from absl import logging

from emergency_ckpt.core.limits import MAX_MESSAGE_CHARS
from emergency_ckpt.errors import (
    AuthenticationFailed,
    CheckpointError,
    LocalTierError,
    NotHeld,
    ProtocolViolation,
    TransferError,
)
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.source import Holdings
from emergency_ckpt.transfer.stream import Stream, constant_timeout
from emergency_ckpt.types import Contents

_LINGER_BYTES = 256 * wire.KIB
_LINGER_S = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """The parts that all sessions of a server share."""

    holdings: Holdings
    run_id: str
    io_timeout_s: float
    on_bytes_sent: Callable[[int], None]


class Session:
    """Serves one sealed stream. ``run`` blocks until the client leaves, misbehaves or is stopped.

    ``idle_since`` is the monotonic time in seconds of the last answer; None during an answer and
    before the first one, because a client that has just proved the secret is about to ask.
    """

    def __init__(self, stream: Stream, service: Service) -> None:
        self.stream = stream
        self.idle_since: float | None = None
        self.stopped = False
        self._waits_from_byte: int | None = None  # received before the request that is waited for
        self._in_body = False  # the client would read a frame as bytes of the body
        self._service = service
        self._timeout = constant_timeout(service.io_timeout_s)

    def run(self) -> None:
        """Serve until the end of the connection, and close it. Raises nothing a peer can cause."""
        try:
            self._serve()
        except ProtocolViolation as error:
            logging.warning("transfer server: %s", error)
            self._refuse("protocol", error)
        except AuthenticationFailed as error:
            logging.warning("transfer server: %s", error)
            self._refuse("unauthenticated", error)
        except OSError as error:
            # A client that leaves, also during a body, reports its own error. To close between
            # two requests, or to keep an unused connection, is its ordinary end.
            if not self._is_between_requests():
                logging.info("transfer server: %s left: %s", self.stream.peer, error)
        except Exception as error:  # noqa: BLE001 - the peer must not be left to guess
            logging.exception(
                "transfer server: unexpected error while serving %s", self.stream.peer
            )
            if not self._in_body:
                self._refuse("refused", error)
        finally:
            self.stream.close()

    def _is_between_requests(self) -> bool:
        return self._waits_from_byte == self.stream.received_bytes

    def stop(self) -> None:
        """Make ``run`` return soon. Called from another thread; does not block."""
        self.stopped = True
        self.stream.abort()

    def _serve(self) -> None:
        self.stream.send_frame(wire.Welcome(), self._service.io_timeout_s)
        while True:
            self._waits_from_byte = self.stream.received_bytes
            request = self.stream.receive_frame(wire.REQUEST, self._service.io_timeout_s)
            self.idle_since = self._waits_from_byte = None
            try:
                self._answer(request)
            except NotHeld as error:
                self._fail("not_held", error)
            except TransferError:
                raise
            except CheckpointError as error:
                logging.warning("transfer server: %s", error)
                self._fail("refused", error)
            self.idle_since = time.monotonic()

    def _answer(self, request: wire.Request) -> None:
        holdings = self._service.holdings
        match request:
            case wire.GetInventory():
                self._send_body(wire.encode_inventory(_ask(holdings.inventory)))
            case wire.GetContents():
                data = _ask(lambda: holdings.contents_bytes(request.digest))
                self._send_held(data, f"contents {request.digest}")
            case wire.GetShards():
                self._send_shards(request)
            case wire.GetHostState():
                data = None
                if request.run_id == self._service.run_id:
                    data = _ask(
                        lambda: holdings.host_state_bytes(
                            request.save, request.owner, request.count
                        )
                    )
                self._send_held(data, _describe(request))
            case wire.PutHostState():
                self._take_host_state(request)

    def _send_held(self, data: bytes | None, target: str) -> None:
        if data is None:
            raise NotHeld("serve", target, "not held here")
        self._send_body(data)

    def _send_body(self, data: bytes) -> None:
        self._announce(len(data))
        self.stream.send_body(data, self._timeout)
        self._in_body = False
        self._service.on_bytes_sent(len(data))

    def _announce(self, nbytes: int) -> None:
        self._in_body = True
        self.stream.send_frame(wire.Body(nbytes=nbytes), self._service.io_timeout_s)

    def _send_shards(self, request: wire.GetShards) -> None:
        with self._service.holdings.mapping_for(request.digest) as (mapping, contents):
            ranges = [self._locate(contents, part) for part in request.ranges]
            self._announce(sum(nbytes for _, nbytes in ranges))
            self.stream.send_ranges(mapping, ranges, self._timeout, self._service.on_bytes_sent)
            self._in_body = False

    def _locate(self, contents: Contents, part: wire.ByteRange) -> tuple[int, int]:
        index, start, nbytes = part
        if index >= len(contents.shards):
            raise ProtocolViolation(
                "serve",
                self.stream.peer,
                "no such shard",
                expected=f"below {len(contents.shards)}",
                actual=index,
            )
        shard = contents.shards[index]
        if start + nbytes > shard.nbytes:
            raise ProtocolViolation(
                "serve",
                self.stream.peer,
                f"the range leaves shard {index}",
                expected=f"an end of at most {shard.nbytes}",
                actual=start + nbytes,
            )
        return shard.offset + start, nbytes

    def _take_host_state(self, request: wire.PutHostState) -> None:
        if request.run_id != self._service.run_id or request.owner >= request.count:
            raise ProtocolViolation(
                "serve", self.stream.peer, f"{_describe(request)} cannot be of this run"
            )
        self.stream.send_frame(wire.Go(), self._service.io_timeout_s)
        data = self.stream.receive_body(request.nbytes, self._timeout)
        try:
            holdings = self._service.holdings
            keep = holdings.hold_host_state if request.for_storage else holdings.publish_host_state
            keep(request.save, request.owner, request.count, data)
        except (CheckpointError, OSError) as error:
            # The client must learn that its buddy has no copy; the connection stays usable.
            logging.warning("transfer server: %s was not kept: %s", _describe(request), error)
            self._fail("refused", error)
            return
        self.stream.send_frame(wire.Done(), self._service.io_timeout_s)

    def _fail(self, code: wire.FailureCode, error: Exception) -> None:
        failure = wire.Failure(code=code, message=str(error)[:MAX_MESSAGE_CHARS])
        self.stream.send_frame(failure, self._service.io_timeout_s)

    def _refuse(self, code: wire.FailureCode, error: Exception) -> None:
        try:
            self._fail(code, error)
        except OSError:
            return  # the peer did not wait for the reason; the log has it
        self.stream.linger(_LINGER_BYTES, _LINGER_S)


def _ask(question: Callable[[], T]) -> T:
    """Return the holdings' answer; an OSError of theirs must not look like a lost connection."""
    try:
        return question()
    except OSError as error:
        raise LocalTierError("serve", "the ramdisk", str(error)) from error


def _describe(request: wire.GetHostState | wire.PutHostState) -> str:
    return (
        f"host state {request.owner} of {request.count} at step {request.step}"
        f" ({request.incarnation})"
    )
