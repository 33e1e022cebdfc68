"""Newcomers: the connections of a server that have not yet proved the run's secret.

One thread reads all of them, so a stranger costs one descriptor and at most one frame of memory,
for a few seconds. Newcomers have places of their own. A connection that has proved the secret is
handed over and takes none of these places.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable

from absl import logging

from emergency_ckpt.core.address import format_address
from emergency_ckpt.core.limits import (
    MAX_UNPROVEN,
    MAX_UNPROVEN_FRAME_BYTES,
    MAX_UNPROVEN_PER_ADDRESS,
)
from emergency_ckpt.core.save.timing import Repeats
from emergency_ckpt.forked import drop_in_child
from emergency_ckpt.run_secret import Credentials
from emergency_ckpt.transfer import wire
from emergency_ckpt.transfer.handshake import NotProved, ServerHandshake, SessionKeys

_ACCEPTED_AT_ONCE = 64
_RETRY_S = 0.1
_LOG_EVERY_S = 10.0


class _Accepted:
    def __init__(
        self, sock: socket.socket, name: str, host: str, handshake: ServerHandshake
    ) -> None:
        self.sock = sock
        self.name = name
        self.host = host
        self.handshake = handshake
        self.since_s = time.monotonic()
        self.received = bytearray()

    def read(self) -> bytes | None:
        """Return the next frame once it is complete, else None. Reads no byte beyond the frame.

        NotProved when the client has left, or its frame is too long.
        """
        while True:
            missing = self._missing()
            if missing == 0:
                payload = bytes(self.received[wire.LENGTH_BYTES :])
                self.received.clear()
                return payload
            try:
                data = self.sock.recv(missing)
            except BlockingIOError:
                return None
            if not data:
                raise NotProved("the client has left")
            self.received += data

    def _missing(self) -> int:
        if len(self.received) < wire.LENGTH_BYTES:
            return wire.LENGTH_BYTES - len(self.received)
        length = int.from_bytes(self.received[: wire.LENGTH_BYTES], "big")
        if length > MAX_UNPROVEN_FRAME_BYTES:
            raise NotProved(f"its frame has {length} bytes, or it speaks another protocol")
        return wire.LENGTH_BYTES + length - len(self.received)


class Accept:
    """Accepts connections and proves them. ``run`` blocks until ``close_down``.

    Args:
      holder: the server's identity.
      on_proved: called with the socket, the peer's address and the keys, in the thread of ``run``;
        it must not block, and owns the socket.
      timeout_s: maximum duration of a whole handshake, in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        holder: str,
        *,
        timeout_s: float,
        on_proved: Callable[[socket.socket, str, SessionKeys], None],
    ) -> None:
        self._listener = listener
        self._credentials = credentials
        self._holder = holder
        self._timeout_s = timeout_s
        self._on_proved = on_proved
        self._accepted: dict[int, _Accepted] = {}  # by descriptor, the oldest first
        self._per_host: Counter[str] = Counter()
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._turned_away = 0
        self._quiet_until_s = 0.0
        self._failures = Repeats()

    def run(self) -> None:
        """Accept connections until ``close_down``. Raises nothing that a stranger can cause."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._stopping:
                events = self._selector.select(self._wait_s())
                for key, _ in events:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fd in self._accepted:  # else it was just closed
                        self._advance(self._accepted[key.fd])
                self._expire()
        finally:
            for accepted in list(self._accepted.values()):
                self._drop(accepted)
            self._selector.close()

    def close_down(self) -> None:
        """Make ``run`` return soon. Called from another thread; does not block."""
        self._stopping = True
        with contextlib.suppress(OSError):  # never listened, or closed down before
            self._listener.shutdown(socket.SHUT_RDWR)

    def _wait_s(self) -> float | None:
        oldest = next(iter(self._accepted.values()), None)
        if oldest is None:
            return None
        return max(oldest.since_s + self._timeout_s - time.monotonic(), 0)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if not self._stopping:
                    # Out of descriptors, or a client that left at once: the next may succeed.
                    self._warn(error)
                    time.sleep(_RETRY_S)
                return
            self._greet(sock, format_address(*peer[:2]), str(peer[0]))

    def _warn(self, error: OSError) -> None:
        """Log the first failure of a kind, and a repeated failure at most once a minute."""
        mention = self._failures.occurred(str(error.errno), time.monotonic())
        if mention is None:
            return
        times = f" ({mention} times since this was last logged)" if mention else ""
        logging.warning("transfer server: accept: %s%s", error, times)

    def _greet(self, sock: socket.socket, name: str, host: str) -> None:
        sock.setblocking(False)
        drop_in_child(sock, socket.socket.close)
        if self._per_host[host] >= MAX_UNPROVEN_PER_ADDRESS:
            self._make_room(host)
        elif len(self._accepted) >= MAX_UNPROVEN:
            self._make_room(self._per_host.most_common(1)[0][0])
        handshake = ServerHandshake(self._credentials, self._holder)
        accepted = _Accepted(sock, name, host, handshake)
        self._accepted[sock.fileno()] = accepted
        self._per_host[host] += 1
        self._selector.register(sock, selectors.EVENT_READ)
        self._advance(accepted)  # its hello has often arrived already

    def _make_room(self, host: str) -> None:
        oldest = next(newcomer for newcomer in self._accepted.values() if newcomer.host == host)
        self._note(oldest.name, "made room for other newcomers")
        self._drop(oldest)

    def _advance(self, accepted: _Accepted) -> None:
        try:
            while (payload := accepted.read()) is not None:
                answer = accepted.handshake.receive(payload)
                if answer is None:
                    self._forget(accepted)
                    keys = accepted.handshake.keys
                    assert keys is not None, "a client has keys once it has proved the secret"
                    self._on_proved(accepted.sock, accepted.name, keys)
                    return
                # A fresh connection has room for one frame.
                accepted.sock.send(wire.encode_frame(answer))
        except (NotProved, OSError) as error:
            self._note(accepted.name, str(error))
            self._drop(accepted)  # without an answer: the client would not believe one

    def _expire(self) -> None:
        now_s = time.monotonic()
        while (oldest := next(iter(self._accepted.values()), None)) is not None:
            if oldest.since_s + self._timeout_s > now_s:
                return
            self._note(oldest.name, "did not prove the secret in time")
            self._drop(oldest)

    def _drop(self, accepted: _Accepted) -> None:
        self._forget(accepted)
        accepted.sock.close()

    def _forget(self, accepted: _Accepted) -> None:
        self._selector.unregister(accepted.sock)
        del self._accepted[accepted.sock.fileno()]
        self._per_host[accepted.host] -= 1
        if self._per_host[accepted.host] == 0:
            del self._per_host[accepted.host]

    def _note(self, name: str, reason: str) -> None:
        """Log the first refused accepted, then at most one line per interval."""
        self._turned_away += 1
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            return
        self._quiet_until_s = now_s + _LOG_EVERY_S
        logging.warning(
            "transfer server: %d connections ended before they had proved the secret;"
            " the last, from %s: %s",
            self._turned_away,
            name,
            wire.excerpt(reason),
        )
        self._turned_away = 0
