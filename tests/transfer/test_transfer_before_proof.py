"""Before the proof of the secret, all that a peer sends means: not reachable."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Sequence

import pytest
from transfer_stranger import stranger_between
from transfer_support import RUN_ID, SECRET, peer_that, read_frame

from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.restore.holders import is_about_copy
from emergency_ckpt.transfer import TransferClient, TransferServer
from emergency_ckpt.transfer.pool import NotConnected


def failure(code: str) -> bytes:
    return json.dumps({"type": "failure", "code": code, "message": "believe me"}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        *(failure(code) for code in ("not_held", "unauthenticated", "busy", "protocol", "refused")),
        b'{"type":"welcome"}',
        b'{"type":"body","nbytes":0}',
        b'{"type":"go"}',
        b'{"type":"done"}',
        b"{}",
        b"\xff",
        b"[" * 8000,
        random.Random(1).randbytes(100),
        bytes(70_000),  # too long for any frame of a handshake
    ],
    ids=lambda answer: repr(answer[:24]),
)
def test_answer_before_proof_says_nothing_about_copies(answer: bytes) -> None:
    def behave(sock: socket.socket) -> None:
        read_frame(sock)
        sock.sendall(len(answer).to_bytes(4, "big") + answer)
        sock.recv(1)

    with (
        peer_that(behave) as address,
        TransferClient(run_id=RUN_ID, secret=SECRET, connect_timeout_s=1) as client,
        pytest.raises(CheckpointError) as failed,
    ):
        client.fetch_contents(address, "0" * 64)
    assert isinstance(failed.value, NotConnected)
    assert not is_about_copy(failed.value)
    assert "believe me" not in str(failed.value)


@pytest.mark.parametrize("place", ["server_hello", "welcome", "reply"])
def test_answer_of_a_stranger_between_is_not_believed(server: TransferServer, place: str) -> None:
    """Who passes on a proof, and then says something himself, has proved nothing."""
    said = failure("not_held")

    def instead(name: str, data: bytes) -> Sequence[bytes]:
        return [len(said).to_bytes(4, "big") + said] if name == place else [data]

    with (
        stranger_between(server.address, instead) as address,
        TransferClient(run_id=RUN_ID, secret=SECRET, connect_timeout_s=1, io_timeout_s=1) as client,
        pytest.raises(CheckpointError) as failed,
    ):
        client.fetch_contents(address, "0" * 64)
    assert not is_about_copy(failed.value)
    assert "believe me" not in str(failed.value)
