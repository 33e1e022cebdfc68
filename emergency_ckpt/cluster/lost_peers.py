"""Peers that died without a word, for a process that waits for them inside ``save``.

The arrays of a state may wait for a dead process in a collective, and JAX's wait for an array has
no end but JAX's heartbeats, 100 s later. A kernel that has lost a process both closes its
connections and refuses new ones to its port. A server that closed an idle connection still takes
new ones, and a partition or a host that is gone neither closes nor refuses anything: those are left
to JAX's heartbeats and to the engine that runs the job.
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
        """``known``: the processes that this one has had to do with."""
        self._coordinator = coordinator
        self._client = client
        self._known = known
        self._address_of = address_of
        self._turn = 0

    def inspect(self) -> None:
        """Look at one suspect, another one each time. Blocks for about a second at most.

        Raises:
          PeerLeft: the process of that suspect has died.
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
                return  # it has ended as intended: it said so, and then closed its port
        except CheckpointError:
            return  # without the service nobody can tell a death from an end
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
            return False  # its address is not known


def _refuses(address: str) -> bool:
    place = parse_address(split_holder(address)[1])
    try:
        with socket.create_connection(place, _CONNECT_TIMEOUT_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
