"""Decoders that read sockets and directories, or messages of processes, as targets of fuzzing."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from fuzz_native import NATIVE
from fuzz_targets import (
    GOLDEN,
    SAVE,
    SECRET,
    SERVER_HELLO,
    TARGETS,
    Target,
    body_of,
    frame_of,
    in_envelope,
)

from emergency_ckpt.cluster.coordination import decode_message
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.ram.locks import OWNER_LOCK, read_owner
from emergency_ckpt.ram.process_files import LEDGER, ProcessFiles
from emergency_ckpt.restore.request import CompleteSteps
from emergency_ckpt.restore.rounds import AllDone, Answer, Failed, Report, Row
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.save import Ballot
from emergency_ckpt.storage.chunks import ChunkIndex
from emergency_ckpt.tools.served_ramdisk import ReadOnlyRamdisk
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.handshake import NotProved, prove_to_server
from emergency_ckpt.transfer.sealing import SEAL_KEY_BYTES, Direction
from emergency_ckpt.transfer.stream import Stream, constant_timeout

_INCARNATION = SAVE.incarnation
_FILES = (
    LEDGER,
    "slot_0.manifest.json",
    f"host_state/{_INCARNATION}-7/process_00000_of_00002.json",
    OWNER_LOCK,
)
"""Of a process directory; the first byte of an input says which has the rest of it."""


class _Place:
    """A directory of a run with one process directory, made at its first use in a process.

    The targets are forks of one process, and run at once.
    """

    def __init__(self) -> None:
        self._root: Path | None = None
        self._pid = 0

    def holding(self, data: bytes) -> Path:
        """Write the input, and return the ramdisk."""
        if self._root is None or self._pid != os.getpid():
            self._pid = os.getpid()
            base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            self._root = Path(tempfile.mkdtemp(prefix="eckpt-fuzz-", dir=base))
            atexit.register(shutil.rmtree, self._root, ignore_errors=True)
        inner = self._root / "run" / "process_00000"
        shutil.rmtree(self._root / "run", ignore_errors=True)
        name = _FILES[data[0] % len(_FILES)] if data else LEDGER
        (inner / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._root / "run").chmod(0o700)
        inner.chmod(0o700)
        (inner / "slot_0.bin").write_bytes(bytes(4096))
        (inner / name).write_bytes(data[1:])
        for path in inner.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        return self._root


_PLACE = _Place()


def _process_directory(data: bytes) -> None:
    ramdisk = ReadOnlyRamdisk(_PLACE.holding(data), "run")
    try:
        ramdisk.inventory()
    finally:
        ramdisk.close()


def _one_file(data: bytes, read: Callable[[int], object], index: int) -> object:
    inner = _PLACE.holding(bytes([index]) + data) / "run" / "process_00000"
    directory = os.open(inner, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return read(directory)
    finally:
        os.close(directory)


def _ledger(data: bytes) -> object:
    return _one_file(data, lambda fd: ProcessFiles(fd, "run").ledger(), 0)


def _from_socket(data: bytes, read: Callable[[Stream], object]) -> None:
    """Let ``read`` take its frames from a peer that sends ``data`` and closes."""
    tcp = socket.create_server(("127.0.0.1", 0))
    with tcp, socket.create_connection(tcp.getsockname()) as client:
        server, _ = tcp.accept()
        with server:
            client.sendall(data[:60_000])
            client.shutdown(socket.SHUT_WR)
            read(Stream(server, "peer"))


def _client_handshake(data: bytes) -> None:
    credentials = Credentials("run", SECRET)
    _from_socket(data, lambda s: prove_to_server(s, credentials, "", constant_timeout(2.0)))


def _frames(data: bytes) -> None:
    def read(stream: Stream) -> None:
        for _ in range(1 + len(data) // 100):
            stream.receive_frame(wire.REQUEST, 2.0)

    _from_socket(data, read)


def _sealed_frame(data: bytes) -> None:
    direction = Direction(bytes(SEAL_KEY_BYTES), peer="peer")
    header, sealed = data[: wire.LENGTH_BYTES], data[wire.LENGTH_BYTES :]
    wire.decode_json(wire.REQUEST, direction.open_frame(header, sealed), "peer")


def _message(kind: object) -> Callable[[bytes], object]:
    return lambda data: decode_message(data, kind, "message")


_FRAME = frame_of(wire.GetInventory())
_SEALED = Direction(bytes(SEAL_KEY_BYTES), peer="p").seal_frame(
    wire.encode_payload(wire.GetInventory())
)
_BROKEN = (CheckpointError, ConnectionError, TimeoutError)
_INVENTORY = HolderInventory("process/0", 0, "h:1", (), ())
_ROW = msgspec.json.encode(Row(report=Report(_INVENTORY, "0", wants_host_state=True)))
_LEDGER = (GOLDEN / "ledger_v1.json").read_bytes().replace(b'"demo"', b'"run"')

PLACES: Mapping[str, Target] = {
    "frames": Target(_frames, [_FRAME], _BROKEN),
    "client_handshake": Target(
        _client_handshake,
        [
            frame_of(SERVER_HELLO),
            frame_of(wire.Failure("not_held", "no")),
            frame_of(wire.Welcome()),
        ],
        (NotProved, ConnectionError, TimeoutError),  # no word about what the peer holds
    ),
    "sealed_frame": Target(_sealed_frame, [_SEALED]),
    "row": Target(_message(Row), [_ROW, msgspec.json.encode(Row())]),
    "answer": Target(
        _message(Answer),
        [msgspec.json.encode(each) for each in (AllDone("1-a"), Failed("no"), CompleteSteps())],
    ),
    "ballot": Target(_message(Ballot), [msgspec.json.encode(Ballot(b"\x5e" * 32, b"\x9d" * 8))]),
    "ledger": Target(_ledger, [_LEDGER]),
    "ledger_body": Target(
        lambda data: _ledger(in_envelope("ledger", format=1)(data)), [body_of(_LEDGER, "ledger")]
    ),
    "owner": Target(lambda data: _one_file(data, read_owner, 4), [b"{}"]),
    "process_directory": Target(
        _process_directory,
        [
            b"\0" + _LEDGER,
            b"\1" + (GOLDEN / "manifest_v1.json").read_bytes(),
            b"\2" + (GOLDEN / "process_00003_of_00008_v1.json").read_bytes(),
        ],
    ),
    "array_metadata": Target(
        lambda data: ChunkIndex("/item", {"w/.zarray": data}).form_of("w"),
        [
            b'{"zarr_format":2,"shape":[8],"chunks":[4],"dtype":"<f4","compressor":null}',
            b'{"zarr_format":2,"shape":[8],"chunks":[4],"dtype":",f4","compressor":null}',
        ],
    ),
}
ALL: Mapping[str, Target] = {**TARGETS, **PLACES, **NATIVE}
