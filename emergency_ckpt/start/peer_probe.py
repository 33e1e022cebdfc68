"""Handshakes between peers at the start, so that a closed port is known before a loss."""

from __future__ import annotations

import threading
import time

from emergency_ckpt.cluster.peers import Peers
from emergency_ckpt.errors import CheckpointError, PeerUnreachable
from emergency_ckpt.events import EventSink


def neighbours(process: int, count: int) -> list[int]:
    """Return the processes before and after ``process`` in a ring of ``count``, without itself."""
    return sorted({(process - 1) % count, (process + 1) % count} - {process})


class PeerProbe:
    """Handshakes with this process's neighbours, all at once, from construction on.

    Each process is greeted by two others, however many there are.

    Args:
      process: (index, count) of this one.
      timeout_s: maximum duration of all of them together.
    """

    def __init__(
        self, peers: Peers, process: tuple[int, int], events: EventSink, timeout_s: float
    ) -> None:
        self._peers = peers
        self._events = events
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._errors: dict[int, CheckpointError | None] = {}
        self._addresses: dict[int, str] = {}
        # Daemons, because a name service may block for longer than any of our deadlines.
        self._threads = {
            peer: threading.Thread(
                target=self._greet, args=(peer,), name=f"eckpt-greeting-{peer}", daemon=True
            )
            for peer in neighbours(*process)
        }
        for thread in self._threads.values():
            thread.start()

    def finish(self, *, required: bool = False) -> None:
        """Wait for the answers until the deadline; a peer that cannot be reached is a warning.

        After all warnings, where all are ``required``: PeerUnreachable when one did not answer, or
        did not prove that it knows the run's secret.
        """
        absent: list[PeerUnreachable] = []
        for peer, thread in self._threads.items():
            thread.join(max(0.0, self._deadline_s - time.monotonic()))
            error = self._errors.get(peer, self._silence(peer))
            if error is not None:
                self._warn(peer, error)
                absent.append(self._unreachable(peer, error))
        if absent and required:
            raise absent[0]

    def _greet(self, peer: int) -> None:
        try:
            address = self._addresses[peer] = self._peers.address_of(peer)
            self._peers.client.greet(address, self._timeout_s)
            self._errors[peer] = None
        except CheckpointError as error:
            self._errors[peer] = error
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            text = f"unexpected {type(error).__name__}: {error}"
            self._errors[peer] = CheckpointError("greet", f"process {peer}", text)

    def _name(self, peer: int) -> str:
        return f"process {peer} at {self._addresses.get(peer, 'an unknown address')}"

    def _unreachable(self, peer: int, error: CheckpointError) -> PeerUnreachable:
        return PeerUnreachable(
            "start",
            self._name(peer),
            f"it cannot be reached from this process: {error}",
            hint="open the port between all hosts of the job (bind_host, bind_port)",
        )

    def _silence(self, peer: int) -> CheckpointError:
        text = f"no answer within {self._timeout_s:g} s"
        return CheckpointError("greet", f"process {peer}", text)

    def _warn(self, peer: int, error: CheckpointError) -> None:
        text = (
            f"{self._name(peer)} cannot be reached from this process, so its RAM could not"
            f" be used here: {error}"
        )
        self._events.emit("start.warning", text=text)
