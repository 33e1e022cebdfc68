"""What ramdisks and storage hold, read by FORMAT.md alone, without the product's code.

A copy of a shard counts when its bytes are those of its step and life. A manifest, a host state or
a marker counts when the soak has not damaged it: the digests of what it wrote there are known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from soak_truth import LEAVES, part

sys.path.append(str(Path(__file__).resolve().parents[1]))
from format_reader import Process, read_ramdisk, read_storage

_DOCUMENTS = re.compile(r"host_state/(\d+)/")


class Save(NamedTuple):
    """One save: its step, and the life whose state it has."""

    step: int
    life: int


@dataclasses.dataclass
class Held:
    """What hosts hold of one save: boxes of leaves by host, and owners of host states."""

    boxes: dict[str, list[tuple[int, tuple[tuple[int, int], ...]]]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )
    states: dict[int, dict[int, set[int]]] = dataclasses.field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )

    def copies(self) -> int:
        """On how many hosts each element of the state is, at the least."""
        fewest: list[int] = []
        for name, leaf in LEAVES.items():
            if 0 in leaf.shape:
                continue
            held = np.zeros(leaf.shape, int)
            for host in {host for host, _ in self.boxes[name]}:
                here = np.zeros(leaf.shape, bool)
                for owner, box in self.boxes[name]:
                    if owner == host:
                        here[tuple(slice(*side) for side in box)] = True
                held += here
            fewest.append(int(held.min()))
        return min(fewest)

    def state_copies(self) -> int:
        """On how many hosts the host state of each process is, at the least."""
        return max(
            (min(len(owners[p]) for p in range(count)) for count, owners in self.states.items()),
            default=0,
        )

    @property
    def is_complete(self) -> bool:
        return self.copies() > 0 and self.state_copies() > 0


class RamLook(NamedTuple):
    """What ramdisks hold. ``known``: a process there knew of a whole step."""

    held: Mapping[Save, Held]
    known: bool

    @property
    def whole(self) -> set[Save]:
        return {save for save, held in self.held.items() if held.is_complete}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _life_of(lives: Mapping[str, int], incarnation: str) -> int | None:
    return lives.get(incarnation.partition(".")[0])


def is_ledger_damaged(process: Process) -> bool:
    return any(fault.startswith("ledger.json") for fault in process.faults)


def look_at_ram(
    hosts: Mapping[int, Path],
    run_id: str,
    lives: Mapping[str, int],
    damaged: Set[str],
    knew: Set[Path],
) -> RamLook:
    """Look at the ramdisk of each host. ``lives``: of each incarnation. Nobody writes meanwhile.

    ``knew``: the process directories with a ledger that named a step before it was damaged.
    """
    held: dict[Save, Held] = defaultdict(Held)
    known = False
    for host, ramdisk in hosts.items():
        for process in read_ramdisk(ramdisk, run_id):
            has_known = is_ledger_damaged(process) and process.path in knew
            known |= has_known or process.complete is not None
            _add_slots(held, host, process, lives, damaged)
            _add_states(held, host, process, lives, damaged)
    return RamLook(dict(held), known)


def _add_slots(
    held: dict[Save, Held], host: int, process: Process, lives: Mapping[str, int], damaged: Set[str]
) -> None:
    for slot in process.slots:
        file = process.path / f"slot_{slot.number}.manifest.json"
        life, step = _life_of(lives, slot.save.incarnation), slot.save.step
        if life is None or sha(file.read_bytes()) in damaged:
            continue
        for shard in slot.shards:
            if shard.is_sound and shard.data == part(shard.path, step, life, shard.box):
                held[Save(step, life)].boxes[shard.path].append((host, shard.box))


def _add_states(
    held: dict[Save, Held], host: int, process: Process, lives: Mapping[str, int], damaged: Set[str]
) -> None:
    for state in process.host_states:
        step, incarnation = state.save.step, state.save.incarnation
        name = f"process_{state.owner:05d}_of_{state.count:05d}.json"
        file = process.path / "host_state" / f"{incarnation}-{step}" / name
        life = _life_of(lives, incarnation)
        if life is not None and sha(file.read_bytes()) not in damaged:
            held[Save(step, life)].states[state.count][state.owner].add(host)


class Store(Protocol):
    """The persistent directory: files or objects by name."""

    def names(self) -> list[str]: ...
    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...


class DirectoryStore:
    """A directory of a file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> list[str]:
        found = self.root.rglob("*") if self.root.is_dir() else ()
        return sorted(str(path.relative_to(self.root)) for path in found if path.is_file())

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.root / name).write_bytes(data)

    def remove(self, name: str) -> None:
        path = self.root / name
        path.unlink()
        with contextlib.suppress(OSError):  # other files are in it
            path.parent.rmdir()


class BucketStore:
    """A prefix of a bucket of the GCS test server."""

    def __init__(self, control: Any, bucket: str, prefix: str) -> None:
        self._control, self._bucket, self._prefix = control, bucket, prefix + "/"

    def names(self) -> list[str]:
        found = self._control.object_names(self._bucket, self._prefix)
        return [name.removeprefix(self._prefix) for name in found]

    def read(self, name: str) -> bytes:
        return self._control.object_bytes(self._bucket, self._prefix + name)

    def write(self, name: str, data: bytes) -> None:
        self._control.put_object(self._bucket, self._prefix + name, data)

    def remove(self, name: str) -> None:
        self._control.delete_object(self._bucket, self._prefix + name)


class StoreLook(NamedTuple):
    """Whole steps of storage, and whether there is an entry, a marker or a bare step at all.

    A bare step has all tensors, and its folder of host states and marker was removed. It does not
    count, and it is no fresh start.
    """

    whole: set[Save]
    known: bool


def marker_name(step: int) -> str:
    return f"host_state/{step}/marker.json"


class _Undamaged:
    """The files of a store; one that the soak has damaged is empty."""

    def __init__(self, store: Store, damaged: Set[str]) -> None:
        self._store, self._damaged = store, damaged

    def names(self) -> list[str]:
        return self._store.names()

    def read(self, name: str) -> bytes:
        data = self._store.read(name)
        return b"" if sha(data) in self._damaged else data


def look_at_storage(store: Store, lives: Mapping[str, int], damaged: Set[str]) -> StoreLook:
    """Look at the steps that the log lists, and at marked ones that it does not name.

    What its chain says is left to the lives. ``damaged``: digests of markers of damaged steps too.
    """
    names = store.names()
    is_bucket = isinstance(store, BucketStore)
    found = read_storage(_Undamaged(store, damaged), is_bucket=is_bucket)
    whole: set[Save] = set()
    for each in found.steps:
        is_kept = each.state in ("complete", "") and not (each.problem or each.faults)
        life = _life_of(lives, each.incarnation)
        if each.marker is not None and is_kept and life is not None:
            whole.add(Save(each.step, life))
    end = "commit_success.txt" if is_bucket else "_CHECKPOINT_METADATA"
    tensors = {int(match[1]) for name in names if (match := re.fullmatch(rf"(\d+)/{end}", name))}
    documents = {int(match[1]) for name in names if (match := _DOCUMENTS.match(name))}
    bare = tensors - documents - {save.step for save in whole}
    known = bool(found.traces or bare or found.refusal)
    return StoreLook(whole if not found.refusal else set(), known)
