"""The handshake: each side proves that it knows the run's secret; both derive the session's keys.

Only ``prove_to_server`` uses a socket. ``ServerHandshake`` takes frames, because one thread serves
all newcomers.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple, TypeVar

import msgspec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from emergency_ckpt.core.limits import MAX_HANDSHAKE_FRAME_BYTES
from emergency_ckpt.errors import AuthenticationFailed, ProtocolViolation
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.security.sealing import SEAL_KEY_BYTES, Direction
from emergency_ckpt.transfer.stream import Stream, Timeout

T = TypeVar("T")


class SessionKeys(NamedTuple):
    """The keys that both sides derive from the secret and their nonces; see PROTOCOL.md."""

    server_mac: bytes
    client_mac: bytes
    from_client: bytes
    from_server: bytes


def new_holder() -> str:
    """Return a random identity for a server, valid until it stops."""
    return secrets.token_hex(wire.HOLDER_BYTES)


def session_keys(
    credentials: Credentials, holder: str, client_nonce: bytes, server_nonce: bytes
) -> SessionKeys:
    """Derive the keys of one connection from the secret.

    The length of each field precedes it, so that no two inputs encode alike.
    """
    fields = (
        b"emergency_ckpt transfer",
        str(wire.PROTOCOL_VERSION).encode(),
        credentials.security.encode(),
        credentials.run_id.encode(),
        holder.encode(),
    )
    derivation = HKDF(
        algorithm=SHA256(),
        length=2 * wire.MAC_BYTES + 2 * SEAL_KEY_BYTES,
        salt=client_nonce + server_nonce,
        info=b"".join(len(field).to_bytes(4, "big") + field for field in fields),
    )
    block = credentials.derive(derivation)
    keys = block[2 * wire.MAC_BYTES :]
    return SessionKeys(
        server_mac=block[: wire.MAC_BYTES],
        client_mac=block[wire.MAC_BYTES : 2 * wire.MAC_BYTES],
        from_client=keys[:SEAL_KEY_BYTES],
        from_server=keys[SEAL_KEY_BYTES:],
    )


class Refused(Exception):
    """The server answered with a Failure; ``pool.failure_error`` returns its typed error."""

    def __init__(self, failure: wire.Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


def prove_to_server(
    stream: Stream, credentials: Credentials, holder: str, timeout: Timeout
) -> None:
    """Run the client's side of the handshake; the stream is sealed on return. Blocks.

    Before the server has proved the secret, it learns a nonce, the mode and the wanted holder only.

    Raises AuthenticationFailed, ProtocolViolation, Refused when the server answers with a Failure,
    and TimeoutError and ConnectionError from the network.
    """
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    hello = wire.Hello(
        protocol=wire.PROTOCOL_VERSION,
        security=credentials.security,
        holder=holder,
        client_nonce=nonce,
    )
    stream.send_frame(hello, timeout())
    proof = _receive(stream, wire.SERVER_PROOF, timeout)
    if isinstance(proof, wire.Failure):  # not authenticated: any process can send one
        said = proof.message[: wire.MAX_EXCERPT_CHARS]
        raise Refused(msgspec.structs.replace(proof, message=said))
    keys = session_keys(credentials, holder, nonce, proof.server_nonce)
    if not hmac.compare_digest(keys.server_mac, proof.mac):
        raise AuthenticationFailed(
            "authenticate",
            stream.peer,
            "the server does not know the secret of this run, or the handshake was altered",
            hint="another run may listen at that address; check run id and secret on both sides",
        )
    stream.send_frame(wire.ClientProof(mac=keys.client_mac), timeout())
    seal(stream, credentials, keys, is_server=False)
    welcome = _receive(stream, wire.WELCOME, timeout)
    if isinstance(welcome, wire.Failure):
        raise Refused(welcome)


def seal(stream: Stream, credentials: Credentials, keys: SessionKeys, *, is_server: bool) -> None:
    """Seal all later frames and bodies of the stream, as the mode has it."""
    encrypts = credentials.security == "aead"
    from_client = Direction(keys.from_client, encrypts=encrypts, peer=stream.peer)
    from_server = Direction(keys.from_server, encrypts=encrypts, peer=stream.peer)
    sending, receiving = (from_server, from_client) if is_server else (from_client, from_server)
    stream.seal(sending, receiving, raw_ranges=credentials.security == "crc")


class ServerHandshake:
    """The server's side of one handshake. The caller passes each received frame to ``receive``.

    Attributes:
      keys: of the session; use them once ``proved`` is true.
    """

    def __init__(self, credentials: Credentials, holder: str, peer: str) -> None:
        self._credentials = credentials
        self._holder = holder
        self._peer = peer
        self.keys: SessionKeys | None = None
        self.proved = False

    def receive(self, payload: bytes) -> wire.ServerProof | None:
        """Take the client's next frame. Return the answer, or None once the client has proved.

        Raises AuthenticationFailed and ProtocolViolation.
        """
        if self.keys is None:
            return self._answer(wire.decode_json(wire.HELLO, payload, self._peer))
        proof = wire.decode_json(wire.CLIENT_PROOF, payload, self._peer)
        if not hmac.compare_digest(self.keys.client_mac, proof.mac):
            raise self._refused("the client does not know the secret of this run")
        self.proved = True
        return None

    def _answer(self, hello: wire.Hello) -> wire.ServerProof:
        if hello.protocol != wire.PROTOCOL_VERSION:
            raise ProtocolViolation(
                "authenticate",
                self._peer,
                "another protocol version",
                expected=wire.PROTOCOL_VERSION,
                actual=hello.protocol,
            )
        if hello.security != self._credentials.security:
            raise self._refused(
                f"transfer_security is {self._credentials.security!r} at the server and"
                f" {hello.security!r} at the client"
            )
        if hello.holder not in ("", self._holder):
            raise self._refused("the client asks for a holder that does not serve here (any more)")
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self.keys = session_keys(self._credentials, hello.holder, hello.client_nonce, nonce)
        return wire.ServerProof(server_nonce=nonce, mac=self.keys.server_mac)

    def _refused(self, problem: str) -> AuthenticationFailed:
        return AuthenticationFailed("authenticate", self._peer, problem)


def _receive(stream: Stream, decoder: msgspec.json.Decoder[T], timeout: Timeout) -> T:
    # Before the proof the peer may be a stranger, so its frames are short.
    return stream.receive_frame(decoder, timeout(), limit_bytes=MAX_HANDSHAKE_FRAME_BYTES)
