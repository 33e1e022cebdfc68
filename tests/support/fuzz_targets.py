"""Every decoder that reads what others wrote, as a function of bytes, with seeds.

A target raises CheckpointError, or what its decoder documents, for bytes that it refuses; anything
else that it raises is a defect. Where a digest covers the bytes, a second target repairs it, so
that the content behind the digest is reached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from emergency_ckpt.cluster import coordination
from emergency_ckpt.core.address import parse_address
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.core.step_log import Entry, Table
from emergency_ckpt.core.timeline import Ancestor, Timeline
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.extras.event_log import decode_line
from emergency_ckpt.ram import manifest
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.save.persistent.rounds import report_of
from emergency_ckpt.state import host_state
from emergency_ckpt.storage import log, marker
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.handshake import ClientHandshake, NotProved, ServerHandshake
from emergency_ckpt.types import Contents, LeafSpec, SaveId, ShardEntry
from examples.faults.faults import parse_fault

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
SECRET = b"a secret of at least thirty-two bytes"
SAVE = SaveId(7, "0000000000000001-00000001", "run")
CONTENTS = Contents(
    SAVE,
    (LeafSpec("a/b", "float32", (4, 2)), LeafSpec("c", "bfloat16", (3,))),
    (ShardEntry(0, ((0, 4), (0, 2)), 0, 32, 1), ShardEntry(1, ((0, 3),), 4096, 6, 2)),
)
CONTENTS_BYTES = manifest.encode_contents(CONTENTS)


class Target(NamedTuple):
    """A decoder. ``refusals``: the errors by which it refuses bytes."""

    decode: Callable[[bytes], object]
    seeds: Sequence[bytes]
    refusals: tuple[type[Exception], ...] = (CheckpointError,)

    def run(self, data: bytes) -> None:
        """Decode ``data``; an error that is no refusal passes through."""
        try:
            self.decode(data)
        except self.refusals:
            return


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def in_envelope(field: str, **others: Any) -> Callable[[bytes], bytes]:
    """Return what puts bytes into a file as the value of ``field``, with their digest."""

    number = others.get("format", 1)
    begins = b"%d\n" % number if number > 1 else b""

    def wrap(data: bytes) -> bytes:
        digest = _sha256(begins + data)
        return msgspec.json.encode({**others, "digest": digest, field: msgspec.Raw(data)})

    return wrap


def _as_text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(data.decode("utf-8", errors="surrogateescape"))


def _frame(decoder: msgspec.json.Decoder[Any]) -> Callable[[bytes], object]:
    return lambda data: wire.decode_json(decoder, data, "peer")


def frame_of(message: msgspec.Struct) -> bytes:
    """The message as it travels before the handshake is over."""
    return wire.encode_frame(message)


def _handshake(data: bytes) -> None:
    """Frames of a client, each after a length of two bytes."""
    server = ServerHandshake(Credentials("run", SECRET), "0" * 32)
    while data:
        length = int.from_bytes(data[:2], "big")
        answer = server.receive(data[2 : 2 + length])
        assert answer is not None, "a stranger has proved the secret"
        data = data[2 + length :]


_WORDS_BYTES = 3  # for each frame of a handshake
_FRAMES = 3


def _altered_on_the_way(sent: Sequence[bytes], number: int, script: bytes) -> bytes:
    """What arrives for the last of ``sent``: itself, changed, or another one."""
    frame, words = sent[-1], script[_WORDS_BYTES * number :][:_WORDS_BYTES].ljust(_WORDS_BYTES)
    kind, at, value = words
    match kind % 4:
        case 1:
            return sent[at % len(sent)]  # of an earlier connection, or reflected
        case 2:
            return frame[: at % len(frame)] + bytes([value]) + frame[at % len(frame) + 1 :]
        case 3:
            return script[_WORDS_BYTES * _FRAMES :]
        case _:
            return frame


def _relayed_handshake(data: bytes) -> None:
    """Who stands between both changes what he likes: for each frame, three bytes say how."""
    credentials, holder = Credentials("run", SECRET), "0" * 32
    earlier = ClientHandshake(credentials)
    heard = ServerHandshake(credentials, holder).receive(wire.encode_payload(earlier.hello))
    assert heard is not None
    proof_of_earlier, _, _ = earlier.receive(wire.encode_payload(heard))
    sent = [wire.encode_payload(each) for each in (earlier.hello, heard, proof_of_earlier)]
    client, server = ClientHandshake(credentials), ServerHandshake(credentials, holder)

    def arrives(message: msgspec.Struct, number: int) -> bytes:
        sent.append(wire.encode_payload(message))
        return _altered_on_the_way(sent, number, data)

    answer = server.receive(arrives(client.hello, 0))
    assert answer is not None
    proof, keys, named = client.receive(arrives(answer, 1))
    last = arrives(proof, 2)
    server.receive(last)
    assert keys == server.keys, "the server believes what is not its client's"
    assert named == holder, "both go on, and the client knows another server"
    assert wire.decode_json(wire.CLIENT_PROOF, last, "client") == proof, "another proof is believed"


def _host_state_of(payload: bytes) -> bytes:
    document = msgspec.json.decode(GOLDEN_HOST_STATE)
    return msgspec.json.encode(
        document | {"digest": _sha256(payload), "payload": msgspec.Raw(payload)}
    )


def _manifest_of(body: bytes) -> bytes:
    return msgspec.json.encode(
        {"digest": _sha256(body), "format": 1, "manifest": msgspec.Raw(body)}
    )


def _marker_of(body: bytes) -> bytes:
    return msgspec.json.encode({"format": 1, "digest": _sha256(body), "marker": msgspec.Raw(body)})


def _check_marker(data: bytes) -> object:
    return marker.check_marker(data, 40, "marker.json")


def _version(data: bytes) -> object:
    return log.decode_version(data, 5, "log")


def _checksums(data: bytes) -> object:
    found = marker.StepMarker(
        SAVE, (), (), CONTENTS.leaves, _sha256(data), marker.TensorsId("", "")
    )
    return marker.decode_checksums(data, found, "checksums.json")


def body_of(data: bytes, field: str) -> bytes:
    """Return the bytes of the value of ``field``."""
    return bytes(msgspec.json.decode(data, type=dict[str, msgspec.Raw])[field])


GOLDEN_HOST_STATE = (GOLDEN / "process_00003_of_00008_v1.json").read_bytes()
_MANIFEST = (GOLDEN / "manifest_v1.json").read_bytes()
_MARKER = (GOLDEN / "marker_v1.json").read_bytes()
_HELLO = wire.encode_payload(wire.Hello(b"n" * 32))
SERVER_HELLO = wire.ServerHello(b"n" * 32, "0" * 32)
_REQUESTS = [
    wire.GetInventory(),
    wire.GetContents("0" * 64),
    wire.GetShards("0" * 64, [(0, 0, 9), (1, 2, 3)]),
    wire.GetHostState("run", SAVE.incarnation, 7, 0, 2),
    wire.PutHostState("run", SAVE.incarnation, 7, 0, 2, 100),
]
_FAILURE = wire.Failure("busy", "later")
_CHAIN = Timeline("000000000002-b", 3, (Ancestor("000000000001-a", 2),), 0)
_ENTRY = Entry(3, "000000000001-a", marker="0" * 64, processes=2, size_bytes=9, metrics={"loss": 1})
_VERSION = log.encode_version(Table(5, "run", False, "000000000002-b", "", _CHAIN, (_ENTRY,), 3))
_LINE = (
    b'{"time_s":1.5,"name":"save.complete","process":0,"slice":0,"run_id":"r","incarnation":"i",'
    b'"fields":{"step":7}}'
)

TARGETS: Mapping[str, Target] = {
    "hello": Target(_frame(wire.HELLO), [_HELLO]),
    "handshake": Target(_handshake, [len(_HELLO).to_bytes(2, "big") + _HELLO], (NotProved,)),
    "relayed_handshake": Target(_relayed_handshake, [bytes(_WORDS_BYTES * _FRAMES)], (NotProved,)),
    "server_hello": Target(_frame(wire.SERVER_HELLO), [wire.encode_payload(SERVER_HELLO)]),
    "client_proof": Target(
        _frame(wire.CLIENT_PROOF), [wire.encode_payload(wire.ClientProof(b"m" * 32))]
    ),
    "request": Target(_frame(wire.REQUEST), [wire.encode_payload(each) for each in _REQUESTS]),
    **{
        name: Target(_frame(decoder), [wire.encode_payload(each) for each in (seed, _FAILURE)])
        for name, decoder, seed in (
            ("body", wire.BODY, wire.Body(5)),
            ("go", wire.GO, wire.Go()),
            ("done", wire.DONE, wire.Done()),
            ("welcome", wire.WELCOME, wire.Welcome()),
        )
    },
    "inventory": Target(
        _frame(wire.INVENTORY),
        [msgspec.json.encode(HolderInventory("process/0", 0, "h:1", (), ()))],
    ),
    "manifest": Target(manifest.decode_manifest, [_MANIFEST]),
    "manifest_body": Target(
        lambda data: manifest.decode_manifest(_manifest_of(data)), [body_of(_MANIFEST, "manifest")]
    ),
    "contents": Target(manifest.decode_contents, [CONTENTS_BYTES]),
    "host_state": Target(host_state.decode, [GOLDEN_HOST_STATE]),
    "host_state_payload": Target(
        lambda data: host_state.decode(_host_state_of(data)),
        [body_of(GOLDEN_HOST_STATE, "payload")],
    ),
    "marker": Target(
        _check_marker,
        [_MARKER],
    ),
    "marker_body": Target(
        lambda data: _check_marker(_marker_of(data)), [body_of(_MARKER, "marker")]
    ),
    "checksums": Target(_checksums, [marker.encode_checksums(CONTENTS.leaves, {})]),
    "log_version": Target(_version, [_VERSION]),
    "log_version_body": Target(
        lambda data: _version(in_envelope("version", format=2)(data)),
        [body_of(_VERSION, "version")],
    ),
    "stage_report": Target(lambda data: report_of(data, "tensors", 7, 0), [b'{"error":"no"}']),
    "number": Target(lambda data: coordination.number_of(data, "number"), [b"17"]),
    "reason": Target(coordination.reason_of, [b"a reason"]),
    "address": Target(_as_text(parse_address), [b"host:80", b"[::1]:80"]),
    "policy": Target(_as_text(parse_placement), [b"striped(2)", b"all_but_primary"]),
    "fault": Target(_as_text(parse_fault), [b"step=3 kill=process:1 lose-ram"]),
    "event_line": Target(decode_line, [_LINE], (ValueError,)),
}
