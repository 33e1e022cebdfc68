"""The client of the transfer protocol: fetch from peers, and push host states to them.

``Fetch`` is one fetch: requests that several streams to one source share, straight into a mapping.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from absl import logging

from emergency_ckpt import _native
from emergency_ckpt._native import Mapping
from emergency_ckpt.core.limits import (
    MAX_HOST_STATE_BYTES,
    MAX_INVENTORY_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_RANGES,
)
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.errors import (
    CheckpointError,
    HostStateTooLarge,
    ProtocolViolation,
    TransferError,
)
from emergency_ckpt.json_decoders import Decoder
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.transfer import handshake, wire
from emergency_ckpt.transfer.pool import ConnectionPool, NotConnected
from emergency_ckpt.transfer.source import ShardTarget
from emergency_ckpt.transfer.stream import Stream, constant_timeout, timeout_until
from emergency_ckpt.types import SaveId


class TransferClient:
    """Thread-safe; all calls block. Connections are kept and used again.

    Every call may raise TransferError (refused, reset, timed out; ``target`` is the address),
    AuthenticationFailed, ProtocolViolation and NotHeld. No source is tried twice, except that a
    kept connection which turns out to be dead is replaced once.

    Addresses are ``host:port``, or ``holder@host:port`` as servers tell them: then a server of
    another identity is not reachable.

    Args:
      connect_timeout_s: maximum time in seconds for the connection and the handshake together.
      io_timeout_s: maximum time in seconds that a peer may stall within a frame or piece.
      streams: number of connections that share one ``fetch_shards``.
    """

    def __init__(
        self,
        *,
        run_id: str,
        secret: bytes,
        connect_timeout_s: float = 10,
        io_timeout_s: float = 30,
        streams: int = 2,
    ) -> None:
        self._pool = ConnectionPool(
            Credentials(run_id, secret), connect_timeout_s=connect_timeout_s, keep=streams
        )
        self._io_timeout_s = io_timeout_s
        self._streams = streams

    def greet(self, address: str, within_s: float) -> None:
        """Complete a handshake with the server on a new connection; send no request."""
        self._pool.greet(address, within_s)

    def has_closed(self, address: str) -> bool:
        """Return whether a kept connection was closed from there, and none was made since."""
        return self._pool.has_closed(address)

    def inventory(self, address: str) -> HolderInventory:
        """Return the published steps and host states of the holder at ``address``."""
        data = self._ask("fetch inventory", address, wire.GetInventory(), MAX_INVENTORY_BYTES)
        return wire.decode_json(wire.INVENTORY, data, address)

    def fetch_contents(self, address: str, digest: str) -> bytes:
        """Fetch the encoding of the contents ``digest``, its SHA-256, which is not checked."""
        request = wire.GetContents(digest=digest)
        return self._ask("fetch contents", address, request, MAX_MANIFEST_BYTES)

    def fetch_shards(
        self,
        address: str,
        digest: str,
        targets: Sequence[ShardTarget],
        into: Mapping,
        deadline_s: float,
        on_shard: Callable[[int, int], None] = lambda position, crc: None,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> list[int]:
        """Fetch whole shards of the contents ``digest`` into a writable mapping or a file.

        Returns the CRC32C of each as received, in the order of ``targets``: the caller compares.
        Blocks for at most ``deadline_s`` seconds. After an error no thread writes to ``into``, and
        the bytes of shards that ``on_shard`` did not get are undefined. ValueError when a target
        is out of bounds.

        Args:
          on_shard: called once with (position in ``targets``, CRC32C) for each shard of at least
            one byte when all its bytes have arrived, from the fetching threads. No thread writes
            to that shard afterwards. An exception that it raises ends the fetch.
          on_bytes: called with the number of bytes of each piece that has arrived, as ``on_shard``.
        """
        for target in targets:
            end = target.offset + target.nbytes
            if min(target.offset, target.nbytes, target.shard) < 0 or end > into.size_bytes:
                raise ValueError(f"{target} leaves the mapping of {into.size_bytes} bytes")
        fetch = Fetch(
            self._pool,
            address,
            digest,
            targets,
            into,
            streams=self._streams,
            deadline_s=deadline_s,
            io_timeout_s=self._io_timeout_s,
            on_bytes=on_bytes,
            on_shard=on_shard,
        )
        return fetch.run()

    def fetch_host_state(self, address: str, save: SaveId, owner: int, count: int) -> bytes:
        """Fetch the encoded host state of process ``owner`` of ``count`` at ``save``."""
        request = wire.GetHostState(save.run_id, save.incarnation, save.step, owner, count)
        return self._ask("fetch host state", address, request, MAX_HOST_STATE_BYTES)

    def push_host_state(
        self,
        address: str,
        save: SaveId,
        owner: int,
        count: int,
        data: bytes,
        *,
        for_storage: bool = False,
    ) -> None:
        """Send an encoded host state to the peer, which has published it when this returns.

        ``for_storage``: the peer holds it in memory instead, for a save to storage.
        HostStateTooLarge above 64 MiB; TransferError when the peer could not keep it.
        """
        if len(data) > MAX_HOST_STATE_BYTES:
            raise HostStateTooLarge(
                "push host state",
                address,
                "too large to transfer",
                expected=f"at most {MAX_HOST_STATE_BYTES} bytes",
                actual=len(data),
            )
        request = wire.PutHostState(
            save.run_id, save.incarnation, save.step, owner, count, len(data), for_storage
        )

        def exchange(stream: Stream) -> None:
            stream.send_frame(request, self._io_timeout_s)
            self._reply(stream, wire.GO)
            stream.send_body(data, constant_timeout(self._io_timeout_s))
            self._reply(stream, wire.DONE)

        self._pool.call("push host state", address, exchange)

    def close(self) -> None:
        """Close unused connections. Calls in progress run to their end."""
        self._pool.close()

    def __enter__(self) -> TransferClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(
        self, operation: str, address: str, request: msgspec.Struct, limit_bytes: int
    ) -> bytes:
        def exchange(stream: Stream) -> bytes:
            stream.send_frame(request, self._io_timeout_s)
            body = self._reply(stream, wire.BODY)
            if body.nbytes > limit_bytes:
                raise ProtocolViolation(
                    operation,
                    address,
                    "the reply is too long",
                    expected=f"at most {limit_bytes} bytes",
                    actual=body.nbytes,
                )
            return stream.receive_body(body.nbytes, constant_timeout(self._io_timeout_s))

        return self._pool.call(operation, address, exchange)

    def _reply(self, stream: Stream, decoder: Decoder[Any]) -> Any:
        reply = stream.receive_frame(decoder, self._io_timeout_s)
        if isinstance(reply, wire.Failure):
            raise handshake.Refused(reply)
        return reply


OPERATION = "fetch shards"
MIN_REQUEST_BYTES = 4 * wire.MIB
MAX_REQUEST_BYTES = 64 * wire.MIB
_REQUESTS_PER_STREAM = 4  # so that a fast stream can take over from a slow one


class Part(NamedTuple):
    """A range of one wanted shard: position in the list, first byte in the shard, length."""

    position: int
    start: int
    nbytes: int


def requests_for(targets: Sequence[ShardTarget], streams: int) -> list[list[Part]]:
    """Divide the wanted shards into requests of about equal size and at most MAX_RANGES parts.

    Large shards are divided, small ones grouped; each byte is in exactly one part. Empty shards
    need no request.
    """
    total = sum(target.nbytes for target in targets)
    share = -(-total // (streams * _REQUESTS_PER_STREAM))
    size = min(max(share, MIN_REQUEST_BYTES), MAX_REQUEST_BYTES)
    result: list[list[Part]] = []
    parts: list[Part] = []
    room = size
    for position, target in enumerate(targets):
        start = 0
        while start < target.nbytes:
            count = min(target.nbytes - start, room)
            parts.append(Part(position, start, count))
            start += count
            room -= count
            if room == 0 or len(parts) == MAX_RANGES:
                result.append(parts)
                parts, room = [], size
    return [*result, parts] if parts else result


class Fetch:
    """Fetches ``targets`` from one address; ``run`` blocks and may be called once.

    After ``run`` has returned or raised, no thread writes to ``into``, or calls ``on_shard``.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        address: str,
        digest: str,
        targets: Sequence[ShardTarget],
        into: Mapping,
        *,
        streams: int,
        deadline_s: float,
        io_timeout_s: float,
        on_bytes: Callable[[int], None],
        on_shard: Callable[[int, int], None],
    ) -> None:
        self._pool = pool
        self._address = address
        self._digest = digest
        self._targets = targets
        self._into = into
        self._deadline_s = time.monotonic() + deadline_s
        self._timeout = timeout_until(self._deadline_s, io_timeout_s, "fetch")
        self._on_bytes = on_bytes
        self._on_shard = on_shard
        self._lock = threading.Lock()
        self._requests = deque(requests_for(targets, streams))
        self._stream_count = min(streams, len(self._requests))
        self._active: set[Stream] = set()
        self._error: BaseException | None = None
        self._not_connected: NotConnected | None = None
        self._received_bytes = 0
        self._crcs: list[dict[int, tuple[int, int]]] = [{} for _ in targets]

    def run(self) -> list[int]:
        """Return the CRC32C of each wanted shard as received, or raise the first error."""
        self._run_streams(self._stream_count)
        # A busy server may refuse streams, at first all of them. A round that received bytes is
        # followed by another one for the rest; a round that received none is the last.
        while self._error is None and self._requests:
            before = self._received_bytes
            self._run_streams(1)
            if self._received_bytes == before and self._not_connected is not None:
                self._error = self._error or self._not_connected
        if self._error is not None:
            raise self._explained(self._error) from self._error.__cause__
        return [self._combined(position) for position in range(len(self._targets))]

    def _run_streams(self, count: int) -> None:
        """Run threads until all have ended."""
        threads = [
            threading.Thread(
                target=self._run_stream, name=f"fetch {self._address} {index}", daemon=True
            )
            for index in range(count)
        ]
        # This ends, since each wait of a thread has the fetch's deadline. Whatever ends the starts
        # or interrupts the wait must not leave a thread behind that writes to the caller's mapping.
        try:
            self._start(threads)
        except BaseException as error:  # noqa: BLE001  raised by run, after the wait
            self._fail(error)
        while alive := [thread for thread in threads if thread.is_alive()]:
            try:
                for thread in alive:
                    thread.join()
            except KeyboardInterrupt as interrupt:
                self._fail(interrupt)

    def _start(self, threads: Sequence[threading.Thread]) -> None:
        """Start as many of the threads as the process can have; they take all requests."""
        for started, thread in enumerate(threads):
            try:
                thread.start()
            except RuntimeError as error:
                if started == 0:
                    raise TransferError(
                        OPERATION, self._address, "no thread can start", actual=str(error)
                    ) from error
                logging.warning("%s: %d streams of %d: %s", OPERATION, started, len(threads), error)
                return

    def _run_stream(self) -> None:
        while (parts := self._next()) is not None:
            try:
                self._pool.call(
                    OPERATION,
                    self._address,
                    lambda stream, parts=parts: self._exchange(stream, parts),
                    connect_within_s=max(self._deadline_s - time.monotonic(), 0),
                )
            except NotConnected as error:
                logging.info("%s: one stream less: %s", OPERATION, error)
                with self._lock:
                    self._not_connected = error
                    self._requests.append(parts)
                return
            except BaseException as error:  # noqa: BLE001  raised by run, in the caller's thread
                self._fail(error)
                return

    def _next(self) -> list[Part] | None:
        with self._lock:
            if self._error is not None or not self._requests:
                return None
            return self._requests.popleft()

    def _exchange(self, stream: Stream, parts: list[Part]) -> None:
        with self._lock:
            if self._error is not None:
                raise ConnectionAbortedError("another stream of this fetch failed")
            self._active.add(stream)
        try:
            self._transfer(stream, parts)
        finally:
            with self._lock:
                self._active.discard(stream)

    def _transfer(self, stream: Stream, parts: list[Part]) -> None:
        targets = [self._targets[part.position] for part in parts]
        ranges = [
            (target.shard, part.start, part.nbytes)
            for target, part in zip(targets, parts, strict=True)
        ]
        stream.send_frame(wire.GetShards(digest=self._digest, ranges=ranges), self._timeout())
        reply = stream.receive_frame(wire.BODY, self._timeout())
        if isinstance(reply, wire.Failure):
            raise handshake.Refused(reply)
        total = sum(part.nbytes for part in parts)
        if reply.nbytes != total:
            raise ProtocolViolation(
                OPERATION, self._address, "another length", expected=total, actual=reply.nbytes
            )
        places = [
            (target.offset + part.start, part.nbytes)
            for target, part in zip(targets, parts, strict=True)
        ]
        crcs = stream.receive_ranges(self._into, places, self._timeout, self._count)
        with self._lock:
            for part, crc in zip(parts, crcs, strict=True):
                self._crcs[part.position][part.start] = (crc, part.nbytes)
            whole = [
                position
                for position in sorted({part.position for part in parts})
                if sum(nbytes for _, nbytes in self._crcs[position].values())
                == self._targets[position].nbytes
            ]
        for position in whole:
            self._on_shard(position, self._combined(position))

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._received_bytes += nbytes
        self._on_bytes(nbytes)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            for stream in self._active:
                stream.abort()  # wakes the other streams: the whole fetch has failed

    def _explained(self, error: BaseException) -> BaseException:
        if type(error) not in (TransferError, NotConnected):
            return error
        assert isinstance(error, CheckpointError)
        total = sum(target.nbytes for target in self._targets)
        return type(error)(
            OPERATION,
            self._address,
            error.problem if error.actual is None else f"{error.problem}: {error.actual}",
            expected=f"{total} bytes",
            actual=f"{self._received_bytes} bytes",
            hint="fetch from another holder",
        )

    def _combined(self, position: int) -> int:
        crc = 0
        for _, (part, nbytes) in sorted(self._crcs[position].items()):
            crc = _native.crc32c_combine(crc, part, nbytes)
        return crc
