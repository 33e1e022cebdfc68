"""The sources of each byte of a restore, by process."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping

from emergency_ckpt.core.run_log.run_events import RunEvent, text, whole

OWN_RAM = "own RAM"
STORAGE = "storage"
UNNAMED_PEERS = "peers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreBytes:
    """Bytes of one restore of the job: ``bytes_of[process][source]``.

    Attributes:
      life: number of the life that began with this restore.
      sources: own RAM, the peers by name, storage; without those that gave nothing.
    """

    life: int
    sources: tuple[str, ...]
    bytes_of: Mapping[int, Mapping[str, int]]

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by source, over all processes."""
        return {
            source: sum(row.get(source, 0) for row in self.bytes_of.values())
            for source in self.sources
        }


def byte_sources_of(events: Iterable[RunEvent]) -> tuple[RestoreBytes, ...]:
    """Return the restores in order of their lives, from the newest that each process finished.

    Peers are named where the log has an event for each (``restore.received``); what such events do
    not account for is under ``UNNAMED_PEERS``.
    """
    finished: dict[tuple[int, int], RunEvent] = {}
    received: dict[tuple[int, int, int | None], dict[str, int]] = defaultdict(dict)
    for event in sorted(events, key=lambda event: event.time_s):
        if event.process is None:
            continue
        key = (event.life, event.process)
        if event.name == "restore.finished":
            finished[key] = event
        elif event.name == "restore.received":
            holder, size_bytes = text(event, "holder"), whole(event, "size_bytes")
            if holder and size_bytes:
                received[*key, whole(event, "step")][holder] = size_bytes  # of the last attempt
    rows: dict[int, dict[int, dict[str, int]]] = defaultdict(dict)
    for (life, process), event in finished.items():
        peers = received.get((life, process, whole(event, "step")), {})
        rows[life][process] = _row(event, peers)
    return tuple(_restore(life, rows[life]) for life in sorted(rows))


def _row(event: RunEvent, peers: Mapping[str, int]) -> dict[str, int]:
    from_peers = whole(event, "bytes_peer") or 0
    named = peers if sum(peers.values()) <= from_peers else {}
    row = {
        OWN_RAM: whole(event, "bytes_local") or 0,
        **named,
        UNNAMED_PEERS: from_peers - sum(named.values()),
        STORAGE: whole(event, "bytes_persistent") or 0,
    }
    return {source: size for source, size in row.items() if size}


def _restore(life: int, rows: Mapping[int, Mapping[str, int]]) -> RestoreBytes:
    used = {source for row in rows.values() for source in row}
    peers = sorted(used - {OWN_RAM, STORAGE, UNNAMED_PEERS})
    ordered = [OWN_RAM, *peers, UNNAMED_PEERS, STORAGE]
    return RestoreBytes(
        life=life,
        sources=tuple(source for source in ordered if source in used),
        bytes_of={process: rows[process] for process in sorted(rows)},
    )
