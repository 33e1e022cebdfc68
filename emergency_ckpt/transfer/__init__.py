"""Transfer shards and host states between hosts over TCP. ``PROTOCOL.md`` specifies the bytes.

One fetch:

1. ``server`` binds an address and draws an identity (``holder@host:port``) that it tells the job.
2. ``client`` connects (``pool``). ``accept`` and ``handshake`` prove to each side that the other
   knows the run's secret. Connections that have not proved it have places of their own.
3. ``client.Fetch`` divides the wanted shards into requests, which several streams share.
4. A ``server.Session`` answers from ``source.Holdings``; ``stream`` moves pieces of 4 MiB
   between the socket and the slot, each under one seal, with a CRC32C of each received range.
5. The caller compares the CRC32C of each shard with that of capture time.

Guaranteed: no byte is served or taken before the proof; every frame, count and length is bounded;
every wait has a deadline, and its error names the address; a frame or piece that was altered,
repeated, left out, reordered or taken from another connection raises AuthenticationFailed; after
``fetch_shards`` returns or raises, no thread writes to its target.

Not guaranteed: that the received bytes are those of capture time (step 5); a retry at another
holder, which the restore decides.
"""

from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.pool import UnprovedPeer
from emergency_ckpt.transfer.server import TransferServer
from emergency_ckpt.transfer.source import Holdings, ShardTarget

__all__ = [
    "Holdings",
    "ShardTarget",
    "TransferClient",
    "TransferServer",
    "UnprovedPeer",
]
