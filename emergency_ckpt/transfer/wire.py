"""Frames and bodies of the protocol: typed, bounded and strictly decoded.

A frame is a 4-byte big-endian length and that many bytes of JSON: one of the structs below, named
by its ``type``. Unknown types, unknown fields and values out of bounds are refused.
``PROTOCOL.md`` is the specification.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from emergency_ckpt.core.limits import (
    MAX_FRAME_BYTES,
    MAX_HOST_STATE_BYTES,
    MAX_INT,
    MAX_MESSAGE_CHARS,
    MAX_NAME_CHARS,
    MAX_PROCESSES,
    MAX_RANGES,
    MAX_SHARDS,
    PLAIN_NAME,
)
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.errors import ProtocolViolation
from emergency_ckpt.json_decoders import Decoder, decoder_of
from emergency_ckpt.types import SaveId

PROTOCOL_VERSION = 3
SHARE_BYTES = 32
MAC_BYTES = 32
HOLDER_BYTES = 16
LENGTH_BYTES = 4

KIB = 1024
MIB = 1024 * KIB
MAX_EXCERPT_CHARS = 200  # of what a peer sent, in errors and logs

Share = Annotated[bytes, msgspec.Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Mac = Annotated[bytes, msgspec.Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]
Holder = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
ShardIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SHARDS)]
Owner = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PROCESSES)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_PROCESSES)]
Incarnation = Annotated[str, msgspec.Meta(pattern=rf"^{PLAIN_NAME}\Z")]
Message = Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE_CHARS)]
ByteRange = tuple[ShardIndex, Size, Size]
"""(shard index, first byte in the shard, number of bytes)."""


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class Hello(_Frame, frozen=True, tag="hello"):
    """Client to server, first: all that a server learns before it has proved the secret."""

    share: Share


class ServerHello(_Frame, frozen=True, tag="server_hello"):
    """Server to client: all that a client learns before it has proved the secret."""

    share: Share
    holder: Holder


class ClientProof(_Frame, frozen=True, tag="client_proof"):
    """Client to server: proof of the secret, bound to both shares."""

    mac: Mac


class Welcome(_Frame, frozen=True, tag="welcome"):
    """Server to client: its proof, since it is sealed; requests may follow."""


class GetInventory(_Frame, frozen=True, tag="get_inventory"):
    """Request for a HolderInventory; answered by Body."""


class GetContents(_Frame, frozen=True, tag="get_contents"):
    """Request for the contents with that digest; answered by Body."""

    digest: Digest


class GetShards(_Frame, frozen=True, tag="get_shards"):
    """Request for byte ranges of shards; answered by Body, the ranges joined in their order."""

    digest: Digest
    ranges: Annotated[list[ByteRange], msgspec.Meta(min_length=1, max_length=MAX_RANGES)]


class _HostStateFrame(_Frame, frozen=True):
    run_id: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
    incarnation: Incarnation
    step: Size
    owner: Owner
    count: Count

    @property
    def save(self) -> SaveId:
        return SaveId(step=self.step, incarnation=self.incarnation, run_id=self.run_id)


class GetHostState(_HostStateFrame, frozen=True, tag="get_host_state"):
    """Request for the host state of one process; answered by Body."""


class PutHostState(_HostStateFrame, frozen=True, tag="put_host_state", omit_defaults=True):
    """Push of a host state. The server answers Go or Failure; after ``nbytes`` bytes, Done.

    ``for_storage``: the server writes it to storage, and needs no copy on its ramdisk.
    """

    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_HOST_STATE_BYTES)]
    for_storage: bool = False


class Body(_Frame, frozen=True, tag="body"):
    """Reply that ``nbytes`` bytes follow."""

    nbytes: Size


class Go(_Frame, frozen=True, tag="go"):
    """Permission to send the body of a push."""


class Done(_Frame, frozen=True, tag="done"):
    """Notice that a push is published."""


FailureCode = Literal["unauthenticated", "busy", "not_held", "protocol", "refused"]


class Failure(_Frame, frozen=True, tag="failure"):
    """Notice that the request was not served, and the reason."""

    code: FailureCode
    message: Message


Request: TypeAlias = GetInventory | GetContents | GetShards | GetHostState | PutHostState

T = TypeVar("T")


HELLO = decoder_of(Hello)
SERVER_HELLO = decoder_of(ServerHello)
CLIENT_PROOF = decoder_of(ClientProof)
WELCOME = decoder_of(Welcome | Failure)
REQUEST = decoder_of(Request)
BODY = decoder_of(Body | Failure)
GO = decoder_of(Go | Failure)
DONE = decoder_of(Done | Failure)
INVENTORY = decoder_of(HolderInventory)


def encode_payload(frame: msgspec.Struct) -> bytes:
    """Return the frame's JSON. ValueError above MAX_FRAME_BYTES."""
    payload = msgspec.json.encode(frame)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes is over {MAX_FRAME_BYTES}")
    return payload


def encode_frame(frame: msgspec.Struct) -> bytes:
    """Return the frame's length and JSON, not sealed."""
    payload = encode_payload(frame)
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def excerpt(text: object) -> str:
    """Return at most MAX_EXCERPT_CHARS of untrusted text, escaped: one line of ASCII."""
    return ascii(str(text)[:MAX_EXCERPT_CHARS])[1:-1]


def decode_json(decoder: Decoder[T], data: bytes, peer: str) -> T:
    """Return the typed value, or raise ProtocolViolation with one reason."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = excerpt(error)
        raise ProtocolViolation("read frame", peer, f"the frame is not valid: {reason}") from error
