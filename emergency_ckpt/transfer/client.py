"""The client of the transfer protocol: fetch from peers, and push host states to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from emergency_ckpt._native import Mapping
from emergency_ckpt.core.limits import MAX_HOST_STATE_BYTES, MAX_INVENTORY_BYTES, MAX_MANIFEST_BYTES
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.errors import HostStateTooLarge, ProtocolViolation
from emergency_ckpt.json_decoders import Decoder
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.fetch import Fetch
from emergency_ckpt.transfer.pool import ConnectionPool
from emergency_ckpt.transfer.security import handshake
from emergency_ckpt.transfer.source import ShardTarget
from emergency_ckpt.transfer.stream import Stream, constant_timeout
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
