"""Which job the n-th one of a seed is, and which faults its incidents have. Pure.

All choices come from the seed. Where one depends on what is found later, such as which file is
damaged, it is a fraction of what there is.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Storage = Literal["none", "directory", "bucket"]
Phase = Literal["life", "rest", "restore"]

INCIDENTS_PER_JOB = 12
ALL_RAM_SHARE = 0.2
"""Share of incidents that cost all RAM besides, where there is storage: most need none of it."""
STRIPPED_SHARE = 0.04
"""Share of incidents in which storage loses all files of one sort, where there is storage."""
NO_RESTORE_SHARE = 0.05
MAX_HOSTS = 8
DAY_S = 86400.0
SHAPES = ((2, 1), (2, 1), (2, 2), (3, 1), (1, 1), (1, 2), (4, 1), (3, 2), (2, 3), (2, 4))

KINDS: Mapping[str, Phase] = {
    # While the job trains, or at its end.
    "kill_some": "life",
    "kill_all": "life",
    "kill_at_event": "life",
    "abort": "life",
    "exception": "life",
    "notice": "life",
    "freeze": "life",
    "hang": "life",
    "good_end": "life",
    "ramdisk_full": "life",
    "storage_full": "life",
    "storage_absent": "life",
    "storage_faults": "life",
    "ramdisk_removed": "life",
    "storage_removed": "life",
    "clock_jump": "life",
    # While no process runs.
    "ram_bit_flip": "rest",
    "hosts_wiped": "rest",
    "slice_wiped": "rest",
    "all_ram_wiped": "rest",
    "ram_truncated": "rest",
    "ram_foreign": "rest",
    "ram_directory_removed": "rest",
    "ram_file_times": "rest",
    "storage_bit_flip": "rest",
    "storage_truncated": "rest",
    "storage_foreign": "rest",
    "storage_step_removed": "rest",
    "storage_stripped": "rest",
    "marker_damaged": "rest",
    # While the next life starts and restores.
    "kill_in_restore": "restore",
    "kill_at_restore_event": "restore",
    "freeze_in_restore": "restore",
    "resets": "restore",
    "storage_absent_at_start": "restore",
    "storage_faults_at_start": "restore",
    "ramdisk_full_at_start": "restore",
    "other_shape": "restore",
    "other_ids": "restore",
    "clock_at_start": "restore",
    "no_restore": "restore",
}
# What ends a life; where none of these was drawn, processes are killed at some moment.
ENDINGS = frozenset({"kill_some", "kill_all", "abort", "exception", "notice", "hang", "good_end"})
NEEDS_STORAGE = frozenset(k for k in KINDS if k.startswith("storage")) | {"marker_damaged"}
# A bucket's server refuses instead.
NEEDS_MOUNT = frozenset({"ramdisk_full", "ramdisk_full_at_start", "storage_full"})

# Points at which a process kills itself.
LIFE_EVENTS = (
    *(
        "save.started",
        "save.captured",
        "save.stage.invalidated",
        "save.stage.copying",
        "save.stage.copied",
    ),
    *(
        "save.stage.staged",
        "save.stage.published",
        "save.stage.host_state_published",
        "save.stage.pushed",
        "save.stage.voted",
    ),
    *("save.complete", "persistent.stage.started", "persistent.stage.host_states_written"),
    *("persistent.stage.tensors_written", "persistent.stage.published", "persistent.complete"),
    *("persistent.removal.begun", "persistent.removal.removed", "persistent.removal.hidden"),
)
RESTORE_EVENTS = (
    *("start.ready", "restore.stage.started", "restore.stage.planned", "restore.stage.loaded"),
    *("restore.stage.fetched", "restore.phases", "restore.stage.received", "restore.finished"),
    *("restore.rejected", "restore.quarantined", "save.started", "save.stage.published"),
)


STRIPPED = ("tensors", "documents", "markers", "host_state", "log", "all but the log")
"""What ``storage_stripped`` takes away of every step."""


class Clock(NamedTuple):
    """A wall clock: by how many seconds it is wrong, and by how many from some step on."""

    ahead_s: float
    jump: tuple[int, float] | None


def clock_of(seed: int, job: int, life: int, host: int) -> Clock:
    """The clock of a host in one life: right, or up to a day wrong, from the start or later."""
    chance = random.Random(f"{seed}/clock/{job}/{life}/{host}")

    def ahead_s() -> float:
        return chance.choice((0.0, 0.0, -DAY_S, DAY_S, chance.uniform(-DAY_S, DAY_S)))

    first, then = ahead_s(), ahead_s()
    jumps = chance.random() < 0.3
    return Clock(first, (chance.randint(0, 10), then - first) if jumps else None)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault. ``numbers``: fractions of what there is, each in [0, 1)."""

    kind: str
    numbers: tuple[float, ...]
    text: str = ""

    def pick(self, which: int, choices: Any) -> Any:
        """One of ``choices`` by the number ``which``."""
        return choices[int(self.numbers[which] * len(choices))]

    def some(self, which: int, count: int) -> list[int]:
        """A part of ``range(count)`` that is not empty."""
        chance = random.Random(self.numbers[which])
        return sorted(chance.sample(range(count), chance.randint(1, count)))


@dataclasses.dataclass(frozen=True)
class Incident:
    """Faults that come together, the length of the life before, and the shape after it."""

    number: int
    faults: tuple[Fault, ...]
    steps: int

    def of(self, phase: Phase) -> list[Fault]:
        return [fault for fault in self.faults if KINDS[fault.kind] == phase]

    @property
    def kinds(self) -> list[str]:
        return [fault.kind for fault in self.faults]


@dataclasses.dataclass(frozen=True)
class Job:
    """A job: its directories are new, and its lives follow each other with an incident between."""

    number: int
    shape: tuple[int, int]
    devices: int
    storage: Storage
    secret_is_given: bool
    settings: Mapping[str, Any]
    incidents: tuple[Incident, ...]


def job_of(seed: int, number: int, *, may_mount: bool = True) -> Job:
    """The job ``number`` of ``seed``: incidents ``INCIDENTS_PER_JOB * number`` and following."""
    chance = random.Random(f"{seed}/{number}")
    storage: Storage = chance.choice(("directory", "directory", "directory", "bucket", "none"))
    interval = 0 if storage == "none" else chance.choice((2, 4, 4))
    settings = {
        "local_save_every": chance.choice((1, 1, 2)),
        "save_every": interval,
        "keep_last_n": chance.choice((1, 2, 2, 3)),
        "local_keep_last_n": chance.choice((1, 1, 2)),
        "placement": chance.choice(("all_but_primary", "all_but_primary", "striped(2)")),
        **chance.choice(
            (
                {"device_reads": "auto"},
                {"device_reads": "pinned_host"},
                {"device_reads": "pageable", "device_copy_bytes": 1 << 20},
            )
        ),
    }
    if storage == "none":
        del settings["keep_last_n"]  # refused without a ``dir``
    kinds = [
        kind
        for kind in KINDS
        if (storage != "none" or kind not in NEEDS_STORAGE)
        and (may_mount or kind not in NEEDS_MOUNT)
    ]
    first = INCIDENTS_PER_JOB * number
    incidents = tuple(
        incident_of(random.Random(f"{seed}/incident/{first + i}"), first + i, kinds)
        for i in range(INCIDENTS_PER_JOB)
    )
    shape = chance.choice(SHAPES)
    return Job(
        number,
        shape,
        chance.choice((1, 1, 2)),
        storage,
        chance.random() < 0.5,
        settings,
        incidents,
    )


def incident_of(chance: random.Random, number: int, kinds: list[str]) -> Incident:
    """One fault, or with a third of the incidents two or three."""
    count = chance.choices((1, 2, 3), (60, 30, 10))[0]
    chosen = chance.sample(kinds, count)
    if "marker_damaged" in kinds and chance.random() < STRIPPED_SHARE:
        chosen.append("storage_stripped")
    lost_share = 0.6 if "storage_stripped" in chosen else ALL_RAM_SHARE
    if "marker_damaged" in kinds and chance.random() < lost_share:
        chosen.append("all_ram_wiped")
    if chance.random() < NO_RESTORE_SHARE:
        chosen.append("no_restore")
    chosen = list(dict.fromkeys(chosen))
    endings = [kind for kind in chosen if kind in ENDINGS]
    chosen = [kind for kind in chosen if kind not in endings[1:]]
    if not endings:
        chosen.append(chance.choice(("kill_all", "kill_some")))
    return Incident(number, tuple(_fault(chance, kind) for kind in chosen), chance.randint(4, 14))


def _fault(chance: random.Random, kind: str) -> Fault:
    text = ""
    if kind == "kill_at_event":
        text = chance.choice(LIFE_EVENTS)
    elif kind == "kill_at_restore_event":
        text = chance.choice(RESTORE_EVENTS)
    elif kind == "no_restore":
        text = chance.choice(("zero", "ahead"))
    elif kind == "storage_stripped":
        text = chance.choice(STRIPPED)
    return Fault(kind, tuple(chance.random() for _ in range(6)), text)
