"""Peers that died without a report, for a process that waits for them inside ``save``.

The arrays of a state may wait for a dead process in a collective. JAX ends its wait for an array
only by its heartbeats, 100 s later. When a process dies, its host's kernel closes the process's
connections and refuses new connections to its port; both together are the proof of a death. A
server that has closed an idle connection still takes new connections. A partition, or a host that
is gone, neither closes nor refuses connections: such losses are left to JAX's heartbeats and to the
engine that runs the job.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection

from emergency_ckpt.cluster.coordination import Coordinator
from emergency_ckpt.cluster.left_processes import have_left
from emergency_ckpt.core.address import parse_address, split_holder
from emergency_ckpt.errors import CheckpointError, PeerLeft
from emergency_ckpt.transfer.client import TransferClient

_CONNECT_TIMEOUT_S = 1.0


class LostPeers:
    """Looks for peers that have died. Belongs to the training thread."""

    def __init__(
        self,
        coordinator: Coordinator,
        client: TransferClient,
        known: Callable[[], Collection[int]],
        address_of: Callable[[int], str],
    ) -> None:
        """``known`` returns the processes that this process has made requests to."""
        self._coordinator = coordinator
        self._client = client
        self._known = known
        self._address_of = address_of
        self._turn = 0

    def inspect(self) -> None:
        """Check one suspect, another one each time. Blocks for about a second at most.

        Raises:
          PeerLeft: the suspect has died.
        """
        suspects = [peer for peer in sorted(self._known()) if self._has_closed(peer)]
        if not suspects:
            return
        self._turn += 1
        suspect = suspects[self._turn % len(suspects)]
        if not _refuses(self._address_of(suspect)):
            return
        try:
            if suspect in have_left(self._coordinator, [suspect]):
                return  # it has ended as intended: it announced that, and then closed its port
        except CheckpointError:
            return  # without the service, a death cannot be distinguished from an end
        problem = (
            f"process {suspect} has died: its connections were closed, and its host refuses new"
            " ones to its port"
        )
        hint = "restart the job; it finds the newest complete step"
        raise PeerLeft("wait for", "the other processes", problem, hint=hint)

    def _has_closed(self, peer: int) -> bool:
        try:
            return self._client.has_closed(self._address_of(peer))
        except CheckpointError:
            return False  # the peer's address is not known


def _refuses(address: str) -> bool:
    place = parse_address(split_holder(address)[1])
    try:
        with socket.create_connection(place, _CONNECT_TIMEOUT_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
