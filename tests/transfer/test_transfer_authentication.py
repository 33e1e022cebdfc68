"""Nobody without the secret gets in, and nobody without it is taken for a peer."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import time
from base64 import b64decode
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_holdings import MemoryHoldings
from transfer_support import (
    RUN_ID,
    SAVE,
    SECRET,
    HandSeals,
    Shares,
    client_proof,
    connect,
    greet_by_hand,
    hello,
    keys_by_hand,
    peer_that,
    read_exactly,
    read_frame,
    read_to_end,
    send_frame,
    server_hello,
)

from emergency_ckpt import run_secret as auth
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.transfer import TransferClient, TransferServer, UnprovedPeer

OTHER_SECRET = b"0f" * 32


@pytest.mark.parametrize(
    ("run_id", "secret"), [(RUN_ID, OTHER_SECRET), ("run-b", SECRET)], ids=["secret", "run id"]
)
def test_client_leaves_a_server_of_another_secret_or_run(
    server: TransferServer, run_id: str, secret: bytes
) -> None:
    with (
        TransferClient(run_id=run_id, secret=secret, connect_timeout_s=1) as client,
        pytest.raises(UnprovedPeer, match="check run id, secret") as failed,
    ):
        client.inventory(server.address)
    assert failed.value.target == server.address


def test_client_shows_a_wrong_server_no_request() -> None:
    """A server that cannot seal a welcome has the client's share and its proof, and no more."""
    seen: list[bytes] = []

    def behave(sock: socket.socket) -> None:
        theirs, mine = b64decode(read_frame(sock)["share"]), Shares()
        keys = keys_by_hand(theirs, mine.share, mine.joint(theirs), key=OTHER_SECRET)
        send_frame(sock, server_hello(mine.share))
        assert read_frame(sock)["type"] == "client_proof"
        sock.sendall(HandSeals(keys.from_server, keys.from_client).frame(b'{"type":"welcome"}'))
        seen.append(read_to_end(sock))

    with (
        peer_that(behave) as address,
        TransferClient(run_id=RUN_ID, secret=SECRET) as client,
        pytest.raises(UnprovedPeer, match="does not know the secret"),
    ):
        client.inventory(address)
    assert seen == [b""]


def test_server_shows_a_stranger_nothing_to_compare_guesses_with(
    server: TransferServer,
) -> None:
    """Its share is random and its identity public; a wrong proof is answered by a close."""
    with connect(server.address) as sock:
        keys, answer = greet_by_hand(sock, Shares(), key=OTHER_SECRET)
        assert answer.keys() == {"type", "share", "holder"}
        assert answer["holder"] == server.contact.partition("@")[0]
        send_frame(sock, client_proof(keys.client_mac))
        assert read_to_end(sock) == b""


def test_requests_before_the_proof_are_not_served(
    holdings: MemoryHoldings, server: TransferServer
) -> None:
    digest = holdings.add(SAVE, [b"the state"])
    for request in (
        {"type": "get_inventory"},
        {"type": "get_shards", "digest": digest, "ranges": [[0, 0, 9]]},
    ):
        with connect(server.address) as sock:
            send_frame(sock, request)
            assert read_to_end(sock) == b""
    with connect(server.address) as sock:  # also not between the hellos and the proof
        greet_by_hand(sock, Shares())
        send_frame(sock, {"type": "get_inventory"})
        assert read_to_end(sock) == b""


def test_recorded_proof_is_of_no_use_on_another_connection(server: TransferServer) -> None:
    mine = Shares()
    with connect(server.address) as sock:
        keys, _ = greet_by_hand(sock, mine)
        send_frame(sock, client_proof(keys.client_mac))
        seals = HandSeals(keys.from_client, keys.from_server)
        welcome = read_exactly(sock, 4 + len(b'{"type":"welcome"}') + 16)
        assert json.loads(seals.opened_frame(welcome[:4], welcome[4:])) == {"type": "welcome"}
    with connect(server.address) as sock:
        greet_by_hand(sock, mine)
        send_frame(sock, client_proof(keys.client_mac))
        assert read_to_end(sock) == b""


def test_servers_own_words_reflected_are_refused(server: TransferServer) -> None:
    """A stranger without the secret sends back what another connection of the server has sealed."""
    with connect(server.address) as known:
        keys, _ = greet_by_hand(known, Shares())
        send_frame(known, client_proof(keys.client_mac))
        welcome = read_exactly(known, 4 + len(b'{"type":"welcome"}') + 16)
        with connect(server.address) as sock:
            greet_by_hand(sock, Shares(), key=OTHER_SECRET)
            sock.sendall(welcome)
            assert read_to_end(sock) == b""
        known.sendall(welcome)  # on its own connection it is of the other direction
        refusal = read_exactly(known, 4)
        length = int.from_bytes(refusal, "big")
        seals = HandSeals(keys.from_client, keys.from_server)
        seals.opened_frame(welcome[:4], welcome[4:])
        failure = json.loads(seals.opened_frame(refusal, read_exactly(known, length + 16)))
        assert failure["code"] == "unauthenticated"
        assert read_to_end(known) == b""


def test_challenge_reflected_at_a_client_is_refused() -> None:
    def behave(sock: socket.socket) -> None:
        share = b64decode(read_frame(sock)["share"])
        send_frame(sock, server_hello(share))
        header = read_exactly(sock, 4)
        proof = read_exactly(sock, int.from_bytes(header, "big"))
        sock.sendall(header + proof + bytes(16))  # its own proof, as if it were a sealed welcome
        read_to_end(sock)

    with (
        peer_that(behave) as address,
        TransferClient(run_id=RUN_ID, secret=SECRET) as client,
        pytest.raises(UnprovedPeer),
    ):
        client.inventory(address)


@pytest.mark.parametrize("share", [bytes(32), b"\1" + bytes(31)])
def test_share_of_small_order_is_refused(server: TransferServer, share: bytes) -> None:
    """With such a point the keys would not depend on the exchange."""
    with connect(server.address) as sock:
        send_frame(sock, hello(share))
        assert read_to_end(sock) == b""


def test_secret_alone_does_not_give_the_keys_of_a_session(server: TransferServer) -> None:
    """Whoever recorded it and learns the secret later has both shares, but not their result."""
    mine = Shares()
    with connect(server.address) as sock:
        keys, answer = greet_by_hand(sock, mine)
        theirs, holder = b64decode(answer["share"]), answer["holder"]
        send_frame(sock, client_proof(keys.client_mac))
        assert read_exactly(sock, 4), "the server has the same keys"
    for joint in (b"", bytes(32), mine.share, theirs):
        guessed = keys_by_hand(mine.share, theirs, joint, holder=holder)
        assert set(guessed).isdisjoint(keys)


def test_peer_that_speaks_something_else_is_not_reachable() -> None:
    def behave(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        read_to_end(sock)

    with (
        peer_that(behave) as address,
        TransferClient(run_id=RUN_ID, secret=SECRET) as client,
        pytest.raises(UnprovedPeer, match="another protocol"),
    ):
        client.inventory(address)


@pytest.mark.parametrize("io_timeout_s", [1.0, 3600.0])
def test_client_that_trickles_its_handshake_is_cut_off(
    holdings: MemoryHoldings, io_timeout_s: float
) -> None:
    """Also where a proved client has an hour for a read."""
    with (
        TransferServer(holdings, run_id=RUN_ID, secret=SECRET, io_timeout_s=io_timeout_s) as server,
        connect(server.address) as slow,
    ):
        # As much as a frame may have: never whole at this pace, so never refused for what it says.
        slow.sendall((1000).to_bytes(4, "big"))
        give_up_s = time.monotonic() + 40
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):  # noqa: PT012
            while time.monotonic() < give_up_s:
                slow.sendall(b" ")  # each byte in time, the handshake as a whole not
                time.sleep(0.05)
        with TransferClient(run_id=RUN_ID, secret=SECRET) as client:
            assert client.inventory(server.address).tensors == ()


def secret_file(tmp_path: Path, data: bytes, mode: int) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("data", "mode", "expected"),
    [
        *((SECRET + b"\n", mode, SECRET) for mode in (0o600, 0o400, 0o440)),
        *((SECRET, mode, "chmod 600") for mode in (0o644, 0o604, 0o660, 0o602)),
        *((data, 0o600, "32 to 4096") for data in (b"", b"x" * 31, b" " * 64, b"x" * 5000)),
    ],
)
def test_secret_file_gives_its_secret_or_says_why(
    tmp_path: Path, data: bytes, mode: int, expected: bytes | str
) -> None:
    """Without the white space around it."""
    path = secret_file(tmp_path, data, mode)
    if isinstance(expected, bytes):
        assert auth.load_secret_file(path) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            auth.load_secret_file(path)


@pytest.mark.parametrize("ends", [b" \t", b"\n\r", b"\x0b\x0c"])
def test_secret_file_of_raw_bytes_is_taken_as_it_is(tmp_path: Path, ends: bytes) -> None:
    """Also where random bytes begin and end as text with white space does."""
    raw = ends + b"\xff\x00" + os.urandom(26) + ends
    assert auth.load_secret_file(secret_file(tmp_path, raw, 0o600)) == raw


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_secret_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """That user knows the secret, and may change it."""
    path = secret_file(tmp_path, auth.generate_secret(), 0o600)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user 12345.*chown"):
        auth.load_secret_file(path)


@pytest.mark.parametrize(
    "weak", ["changeme" * 4, "password" * 4 + "1", "0" * 64, "5e" * 32, "0123456789" * 4]
)
def test_weak_secret_is_refused_with_a_way_out(tmp_path: Path, weak: str) -> None:
    with pytest.raises(ConfigError, match=r"can be guessed.*token_hex"):
        auth.load_secret_file(secret_file(tmp_path, weak.encode(), 0o600))
    with pytest.raises(ConfigError, match=r"ECKPT_SECRET can be guessed"):
        auth.secret_from_environment({"ECKPT_SECRET": weak})


@given(st.binary(min_size=16, max_size=16), st.sampled_from(["hex", "base64", "raw"]))
def test_random_secret_is_never_called_weak(data: bytes, form: str) -> None:
    """Of 16 bytes in hexadecimal digits, the least that is accepted, and more."""
    random = hashlib.sha256(data).digest()
    forms = {
        "hex": random[:16].hex().encode(),
        "base64": base64.b64encode(random[:24]),
        "raw": random,
    }
    text = forms[form].decode("utf-8", "surrogateescape").replace("\0", "0")
    assert auth.secret_from_environment({"ECKPT_SECRET": text})


def test_short_secret_of_a_peer_is_refused() -> None:
    with pytest.raises(ConfigError, match="32 to 4096"):
        TransferClient(run_id=RUN_ID, secret=b"short")
    with pytest.raises(ConfigError, match="32 to 4096"):
        TransferServer(MemoryHoldings(), run_id=RUN_ID, secret=b"short")


def test_environment_gives_a_secret_or_none() -> None:
    assert auth.secret_from_environment({}) is None
    secret = auth.generate_secret()
    assert auth.secret_from_environment({"ECKPT_SECRET": secret.decode()}) == secret
    with pytest.raises(ConfigError, match="ECKPT_SECRET"):
        auth.secret_from_environment({"ECKPT_SECRET": "short"})


def test_generated_secrets_are_long_and_differ() -> None:
    first, second = auth.generate_secret(), auth.generate_secret()
    assert first != second
    assert len(bytes.fromhex(first.decode())) == 32


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        *((kind, "not a regular file") for kind in ("pipe", "directory", "device")),
        *((kind, "cannot be read") for kind in ("socket", "absent", "impossible")),
        ("padded", "has 4097 bytes"),
    ],
)
def test_secret_file_of_another_kind_is_a_config_error(
    tmp_path: Path, kind: str, said: str
) -> None:
    """Without waiting for the other end of a pipe."""
    path = tmp_path / "secret"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "directory":
        path.mkdir(0o700)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "impossible":
        path = Path("/tmp/a\0b")
    elif kind == "padded":
        secret_file(tmp_path, SECRET + b" " * 5000, 0o600)
    with pytest.raises(ConfigError, match=said):
        auth.load_secret_file(path)


def test_environment_secret_that_is_not_utf8_is_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b"\xff\xfe" + os.urandom(40).replace(b"\0", b"0") + b"\xff"
    monkeypatch.setitem(os.environb, auth.SECRET_VARIABLE.encode(), raw)
    assert auth.secret_from_environment(os.environ) == raw
    with pytest.raises(ConfigError, match="environment cannot have"):
        auth.secret_from_environment({auth.SECRET_VARIABLE: "\ud800" * 40})
