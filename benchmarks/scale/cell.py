"""One cell of the scale table: a save's vote, and a restore at its leader.

The coordination service is simulated in memory.
"""

import dataclasses
from typing import Any

import jax

from benchmarks.scale.job import (
    DEADLINE_S,
    Cell,
    Client,
    NotYet,
    Processes,
    Stored,
    restore,
    timed_cpu,
)
from benchmarks.scale.model import SAVE
from emergency_ckpt.core.placement import place
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.save.vote import Ballot, Vote


class MemoryService:
    """The values of a service. It is the one connection of all processes, and nothing waits."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def connection(self, _process: int) -> "MemoryService":
        return self

    def cpu_s(self) -> float:
        return 0.0

    def key_value_set_bytes(self, key: str, value: bytes, _allow_overwrite: bool) -> None:
        self._values[key] = value

    def blocking_key_value_get_bytes(self, key: str, _timeout_ms: int) -> bytes:
        if key not in self._values:
            raise NotYet(key)
        return self._values[key]

    def key_value_try_get_bytes(self, key: str) -> bytes:
        raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")

    def key_value_dir_get_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
        return [(k, v) for k, v in self._values.items() if k.startswith(prefix + "/")]

    def key_value_delete(self, prefix: str) -> None:
        """Keep the values, because nobody would miss their memory."""


def lead(cell: Cell, stored: Stored) -> dict[str, Any]:
    """Measure a save's vote and a restore of the job at its leader and between processes."""
    count, policy = cell.process_count, parse_placement(cell.placement)
    place_s, _ = timed_cpu(lambda: place(policy, cell.topology, 1 % count, cell.held()))
    save = vote_bytes(stored.digests)
    processes = Processes(MemoryService(), count)
    leader = restore(processes, cell, stored)
    restored = _moved_bytes(processes.clients)
    return {
        **dataclasses.asdict(cell),
        "processes": count,
        "place_s": place_s,
        "save_bytes_per_process": max(save[1:]),
        "save_bytes": sum(save),
        "inventories_s": leader.taken_s,
        "manifests_read": leader.peers.fetched,
        "plan_s": leader.planned_s - leader.searched_s,
        "divergence_s": leader.searched_s,
        "leader_bytes": leader.grown_bytes,
        "restore_bytes_per_process": max(restored[1:]),
        "restore_bytes": sum(restored),
    }


def vote_bytes(digests: list[str]) -> list[int]:
    """Return the bytes through the service of one save's vote, by process."""
    processes = Processes(MemoryService(), len(digests))
    votes = [Vote(coordinator, DEADLINE_S) for coordinator in processes.coordinators]
    ballots = [Ballot(bytes.fromhex(digest), b"of eight") for digest in digests]
    for vote, ballot in zip(votes[1:], ballots[1:], strict=True):  # what each waits for is there
        vote.hand_in(SAVE, ballot)
    outcome = votes[0].cast(SAVE, ballots[0])
    assert outcome.kind == "complete", outcome
    for vote in votes[1:]:
        assert vote.learn(SAVE).kind == "complete"
    return _moved_bytes(processes.clients)


def _moved_bytes(clients: list[Client]) -> list[int]:
    return [client.moved_bytes for client in clients]
