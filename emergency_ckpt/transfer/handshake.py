"""The handshake: each side proves that it knows the run's secret; both derive the session's keys.

The client proves first, so a stranger who connects hears nothing that depends on the secret: he
cannot try guesses at a weak one. The seal of the server's first frame is the server's proof. The
session's keys depend on an ephemeral X25519 exchange. Both sides are state machines over frames;
each state accepts one frame, and says nothing about another one but that there is no proof.

    server  awaits_hello -> awaits_proof -> proved
    client  awaits_server_hello -> awaits_welcome -> proved
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple, TypeVar

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from emergency_ckpt.core.limits import MAX_UNPROVEN_FRAME_BYTES
from emergency_ckpt.errors import AuthenticationFailed, ProtocolViolation
from emergency_ckpt.json_decoders import Decoder
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.sealing import SEAL_KEY_BYTES, Direction
from emergency_ckpt.transfer.stream import Stream, Timeout

T = TypeVar("T")


class SessionKeys(NamedTuple):
    """The keys that both sides derive; see PROTOCOL.md."""

    client_mac: bytes
    from_client: bytes
    from_server: bytes


class NotProved(Exception):
    """The other side has not proved that it knows the secret, so nothing that it says counts."""


class LeftUnproved(ConnectionError):
    """The server closed the connection after the client's proof: it has no place, or other keys."""


class Refused(Exception):
    """The server answered with a sealed Failure; ``pool.failure_error`` returns its typed error."""

    def __init__(self, failure: wire.Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


def new_holder() -> str:
    """Return a random identity for a server, valid until it stops."""
    return secrets.token_hex(wire.HOLDER_BYTES)


def session_keys(
    credentials: Credentials, holder: str, client_share: bytes, server_share: bytes, joint: bytes
) -> SessionKeys:
    """Derive the keys of one connection from the secret and the ``joint`` result of X25519.

    The length of each field precedes it, so that no two inputs encode alike.
    """
    fields = (
        b"emergency_ckpt transfer",
        str(wire.PROTOCOL_VERSION).encode(),
        credentials.run_id.encode(),
        holder.encode(),
    )
    derivation = HKDF(
        algorithm=SHA256(),
        length=wire.MAC_BYTES + 2 * SEAL_KEY_BYTES,
        salt=client_share + server_share,
        info=b"".join(len(field).to_bytes(4, "big") + field for field in fields),
    )
    block = credentials.derive(derivation, joint)
    keys = block[wire.MAC_BYTES :]
    return SessionKeys(
        client_mac=block[: wire.MAC_BYTES],
        from_client=keys[:SEAL_KEY_BYTES],
        from_server=keys[SEAL_KEY_BYTES:],
    )


class ClientHandshake:
    """The client's side of one handshake: send ``hello``, then pass the answer to ``receive``.

    A server that does not know the secret learns 32 random bytes, and a MAC of its own question.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._private = X25519PrivateKey.generate()
        self.hello = wire.Hello(share=_share_of(self._private))

    def receive(self, payload: bytes) -> tuple[wire.ClientProof, SessionKeys, str]:
        """Take the server's answer; return the own proof, the keys, and the identity it names.

        Nothing is proved yet: that is the first frame that opens with these keys. NotProved for
        anything but such an answer.
        """
        answer = _decoded(wire.SERVER_HELLO, payload)
        shares = self.hello.share, answer.share
        joint = _joint(self._private, answer.share)
        keys = session_keys(self._credentials, answer.holder, *shares, joint)
        return wire.ClientProof(mac=keys.client_mac), keys, answer.holder


class ServerHandshake:
    """The server's side of one handshake. The caller passes each received frame to ``receive``.

    Attributes:
      keys: of the session; use them once ``receive`` has returned None.
    """

    def __init__(self, credentials: Credentials, holder: str) -> None:
        self._credentials = credentials
        self._holder = holder
        self.keys: SessionKeys | None = None

    def receive(self, payload: bytes) -> wire.ServerHello | None:
        """Take the client's next frame. Return the answer, or None once the client has proved.

        NotProved for anything else; the connection must then be closed.
        """
        if self.keys is None:
            return self._answer(_decoded(wire.HELLO, payload))
        proof = _decoded(wire.CLIENT_PROOF, payload)
        if not hmac.compare_digest(self.keys.client_mac, proof.mac):
            raise NotProved("the client does not know the secret of this run")
        return None

    def _answer(self, hello: wire.Hello) -> wire.ServerHello:
        private = X25519PrivateKey.generate()
        share, joint = _share_of(private), _joint(private, hello.share)
        self.keys = session_keys(self._credentials, self._holder, hello.share, share, joint)
        return wire.ServerHello(share=share, holder=self._holder)


def prove_to_server(
    stream: Stream, credentials: Credentials, holder: str, timeout: Timeout
) -> None:
    """Run the client's side of the handshake; the stream is sealed on return. Blocks.

    Args:
      holder: the identity that the server must have; empty when any server will do.

    Raises NotProved when the server does not prove the secret or is another one; LeftUnproved when
    it closes the connection in place of its proof; Refused for its Failure after the proof;
    TimeoutError and ConnectionError from the network.
    """
    handshake = ClientHandshake(credentials)
    stream.send_frame(handshake.hello, timeout())
    try:
        answer = stream.receive_payload(timeout(), limit_bytes=MAX_UNPROVEN_FRAME_BYTES)
    except ProtocolViolation as error:
        raise NotProved(error.problem) from error
    proof, keys, identity = handshake.receive(answer)
    if holder not in ("", identity):
        raise NotProved("another server has that address now")
    stream.send_frame(proof, timeout())
    seal(stream, keys, is_server=False)
    try:
        welcome = stream.receive_frame(wire.WELCOME, timeout())
    except ConnectionError as error:
        raise LeftUnproved(str(error)) from error
    except (AuthenticationFailed, ProtocolViolation) as error:
        raise NotProved(
            "it does not know the secret of this run, or its answer was altered"
        ) from error
    if isinstance(welcome, wire.Failure):
        raise Refused(welcome)


def seal(stream: Stream, keys: SessionKeys, *, is_server: bool) -> None:
    """Seal all later frames and bodies of the stream."""
    from_client = Direction(keys.from_client, peer=stream.peer)
    from_server = Direction(keys.from_server, peer=stream.peer)
    sending, receiving = (from_server, from_client) if is_server else (from_client, from_server)
    stream.seal(sending, receiving)


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
