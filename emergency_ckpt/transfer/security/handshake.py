"""The handshake: each side proves that it knows the run's secret; both derive the session's keys.

Both sides are state machines over frames. Each state accepts one frame, and says nothing about
another one but that there is no proof. The session's keys depend on an ephemeral X25519 exchange.

    server  awaits_hello -> awaits_proof -> proved
    client  awaits_proof -> proved
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple, TypeVar

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from emergency_ckpt.core.limits import MAX_UNPROVEN_FRAME_BYTES
from emergency_ckpt.errors import ProtocolViolation
from emergency_ckpt.json_decoders import Decoder
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.security.sealing import SEAL_KEY_BYTES, Direction
from emergency_ckpt.transfer.stream import Stream, Timeout
from emergency_ckpt.types import Security

T = TypeVar("T")


class SessionKeys(NamedTuple):
    """The keys that both sides derive; see PROTOCOL.md."""

    server_mac: bytes
    client_mac: bytes
    from_client: bytes
    from_server: bytes


class Terms(NamedTuple):
    """The demands of a server, which each client takes over under its proof.

    Attributes:
      security: the protection of the bytes of shards.
      holder: the identity of the server.
    """

    security: Security
    holder: str


class NotProved(Exception):
    """The other side has not proved that it knows the secret, so nothing that it says counts."""


class Refused(Exception):
    """The server answered with a sealed Failure; ``pool.failure_error`` returns its typed error."""

    def __init__(self, failure: wire.Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


def new_holder() -> str:
    """Return a random identity for a server, valid until it stops."""
    return secrets.token_hex(wire.HOLDER_BYTES)


def session_keys(
    credentials: Credentials, terms: Terms, client_share: bytes, server_share: bytes, joint: bytes
) -> SessionKeys:
    """Derive the keys of one connection from the secret and the ``joint`` result of X25519.

    The length of each field precedes it, so that no two inputs encode alike.
    """
    fields = (
        b"emergency_ckpt transfer",
        str(wire.PROTOCOL_VERSION).encode(),
        credentials.run_id.encode(),
        terms.security.encode(),
        terms.holder.encode(),
    )
    derivation = HKDF(
        algorithm=SHA256(),
        length=2 * wire.MAC_BYTES + 2 * SEAL_KEY_BYTES,
        salt=client_share + server_share,
        info=b"".join(len(field).to_bytes(4, "big") + field for field in fields),
    )
    block = credentials.derive(derivation, joint)
    keys = block[2 * wire.MAC_BYTES :]
    return SessionKeys(
        server_mac=block[: wire.MAC_BYTES],
        client_mac=block[wire.MAC_BYTES : 2 * wire.MAC_BYTES],
        from_client=keys[:SEAL_KEY_BYTES],
        from_server=keys[SEAL_KEY_BYTES:],
    )


class ClientHandshake:
    """The client's side of one handshake: send ``hello``, then pass the answer to ``receive``.

    Before the server has proved the secret, it learns 32 random bytes.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._private = X25519PrivateKey.generate()
        self.hello = wire.Hello(share=_share_of(self._private))

    def receive(self, payload: bytes) -> tuple[wire.ClientProof, SessionKeys, Terms]:
        """Take the server's answer; return the own proof, and what the server has proved.

        NotProved for anything but the proof of the secret.
        """
        proof = _decoded(wire.SERVER_PROOF, payload)
        terms = Terms(proof.security, proof.holder)
        shares = self.hello.share, proof.share
        joint = _joint(self._private, proof.share)
        keys = session_keys(self._credentials, terms, *shares, joint)
        if not hmac.compare_digest(keys.server_mac, proof.mac):
            raise NotProved("it does not know the secret of this run, or the answer was altered")
        return wire.ClientProof(mac=keys.client_mac), keys, terms


class ServerHandshake:
    """The server's side of one handshake. The caller passes each received frame to ``receive``.

    Attributes:
      keys: of the session; use them once ``proved`` is true.
    """

    def __init__(self, credentials: Credentials, terms: Terms) -> None:
        self._credentials = credentials
        self._terms = terms
        self.keys: SessionKeys | None = None
        self.proved = False

    def receive(self, payload: bytes) -> wire.ServerProof | None:
        """Take the client's next frame. Return the answer, or None once the client has proved.

        NotProved for anything else; the connection must then be closed.
        """
        if self.keys is None:
            return self._answer(_decoded(wire.HELLO, payload))
        proof = _decoded(wire.CLIENT_PROOF, payload)
        if not hmac.compare_digest(self.keys.client_mac, proof.mac):
            raise NotProved("the client does not know the secret of this run")
        self.proved = True
        return None

    def _answer(self, hello: wire.Hello) -> wire.ServerProof:
        private = X25519PrivateKey.generate()
        share, joint = _share_of(private), _joint(private, hello.share)
        self.keys = session_keys(self._credentials, self._terms, hello.share, share, joint)
        return wire.ServerProof(
            share=share,
            security=self._terms.security,
            holder=self._terms.holder,
            mac=self.keys.server_mac,
        )


def prove_to_server(
    stream: Stream, credentials: Credentials, holder: str, timeout: Timeout
) -> None:
    """Run the client's side of the handshake; the stream is sealed on return. Blocks.

    Args:
      holder: the identity that the server must have; empty when any server will do.

    Raises NotProved when the server does not prove the secret or is another one; Refused for its
    Failure after that; AuthenticationFailed and ProtocolViolation for what is no sealed answer;
    TimeoutError and ConnectionError from the network.
    """
    handshake = ClientHandshake(credentials)
    stream.send_frame(handshake.hello, timeout())
    try:
        answer = stream.receive_payload(timeout(), limit_bytes=MAX_UNPROVEN_FRAME_BYTES)
    except ProtocolViolation as error:
        raise NotProved(error.problem) from error
    proof, keys, terms = handshake.receive(answer)
    if holder not in ("", terms.holder):
        raise NotProved("another server of this run has that address now")
    stream.send_frame(proof, timeout())
    seal(stream, keys, terms.security, is_server=False)
    welcome = stream.receive_frame(wire.WELCOME, timeout())
    if isinstance(welcome, wire.Failure):
        raise Refused(welcome)


def seal(stream: Stream, keys: SessionKeys, security: Security, *, is_server: bool) -> None:
    """Seal all later frames and bodies of the stream, as the mode has it."""
    from_client = Direction(keys.from_client, peer=stream.peer)
    from_server = Direction(keys.from_server, peer=stream.peer)
    sending, receiving = (from_server, from_client) if is_server else (from_client, from_server)
    stream.seal(sending, receiving, raw_ranges=security == "crc")


def _decoded(decoder: Decoder[T], payload: bytes) -> T:
    try:
        return wire.decode_json(decoder, payload, "")
    except ProtocolViolation as error:
        raise NotProved(error.problem) from error


def _share_of(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


def _joint(private: X25519PrivateKey, share: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(share))
    except ValueError as error:  # a point of small order, which no honest side sends
        raise NotProved("its share of the key exchange is not valid") from error
