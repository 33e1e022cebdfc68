"""What ramdisks and storage hold, read by FORMAT.md alone, without the product's code.

A copy of a shard counts when its bytes are those of its step and life. A manifest, a host state or
a marker counts when the soak has not damaged it: the digests of what it wrote there are known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from soak_truth import LEAVES, part

_HOST_STATE = re.compile(r"process_(\d+)_of_(\d+)\.json")
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
    def is_whole(self) -> bool:
        return self.copies() > 0 and self.state_copies() > 0


class RamLook(NamedTuple):
    """What ramdisks hold. ``known``: a process there knew of a whole step."""

    held: Mapping[Save, Held]
    known: bool

    @property
    def whole(self) -> set[Save]:
        return {save for save, held in self.held.items() if held.is_whole}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _inner(data: bytes) -> dict[str, Any]:
    """The document, out of its signature where it has one."""
    document = json.loads(data)
    return document.get("file", document)


def _life_of(lives: Mapping[str, int], incarnation: str) -> int | None:
    return lives.get(incarnation.partition(".")[0])


def look_at_ram(
    hosts: Mapping[int, Path], run_id: str, lives: Mapping[str, int], damaged: Set[str]
) -> RamLook:
    """Look at the ramdisk of each host. ``lives``: of each incarnation. Nobody writes meanwhile."""
    held: dict[Save, Held] = defaultdict(Held)
    known = False
    for host, ramdisk in hosts.items():
        for directory in sorted((ramdisk / run_id).glob("process_*")):
            known |= _knows_of_a_step(directory / "ledger.json")
            for path in sorted(directory.glob("slot_*.manifest.json")):
                _look_at_slot(held, host, path, lives, damaged)
            for path in sorted(directory.glob("host_state/*/process_*.json")):
                _look_at_state(held, host, path, lives, damaged)
    return RamLook(dict(held), known)


def _knows_of_a_step(path: Path) -> bool:
    try:
        return _is_file(path) and _inner(path.read_bytes())["ledger"]["complete"] is not None
    except (ValueError, KeyError, TypeError):
        return True  # of the soak: it was there


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _look_at_slot(
    held: dict[Save, Held], host: int, path: Path, lives: Mapping[str, int], damaged: Set[str]
) -> None:
    slot = path.with_name(path.name.split(".")[0] + ".bin")
    if not (_is_file(path) and _is_file(slot)):
        return
    data = path.read_bytes()
    if sha(data) in damaged:
        return
    contents = _inner(data)["manifest"]["contents"]
    life = _life_of(lives, contents["save"]["incarnation"])
    if life is None:
        return
    step = contents["save"]["step"]
    names = [leaf["path"] for leaf in contents["leaves"]]
    stored = slot.read_bytes()
    for shard in contents["shards"]:
        name, box = names[shard["leaf"]], tuple(map(tuple, shard["box"]))
        found = stored[shard["offset"] : shard["offset"] + shard["nbytes"]]
        if found == part(name, step, life, box):
            held[Save(step, life)].boxes[name].append((host, box))


def _look_at_state(
    held: dict[Save, Held], host: int, path: Path, lives: Mapping[str, int], damaged: Set[str]
) -> None:
    named = _HOST_STATE.fullmatch(path.name)
    if named is None or not _is_file(path):
        return
    data = path.read_bytes()
    if sha(data) in damaged:
        return
    save = _inner(data)["save"]
    life = _life_of(lives, save["incarnation"])
    if life is not None:
        owner, count = int(named[1]), int(named[2])
        held[Save(save["step"], life)].states[count][owner].add(host)


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
    """Whole steps of storage, and whether there is a marker at all.

    ``bare``: steps with all tensors, whose folder of host states and marker was removed. They look
    like steps of plain Orbax, so that a restore with host states refuses them by an error.
    """

    whole: set[Save]
    known: bool
    bare: frozenset[int] = frozenset()


def marker_name(step: int) -> str:
    return f"host_state/{step}/marker.json"


def look_at_storage(store: Store, lives: Mapping[str, int], damaged: Set[str]) -> StoreLook:
    """Look at the steps in their own places. ``damaged``: digests of markers of damaged steps."""
    names = store.names()
    there = set(names)
    end = "commit_success.txt" if isinstance(store, BucketStore) else "_CHECKPOINT_METADATA"
    tensors = {int(match[1]) for name in names if (match := re.fullmatch(rf"(\d+)/{end}", name))}
    bare = tensors - {int(match[1]) for name in names if (match := _DOCUMENTS.match(name))}
    whole: set[Save] = set()
    known = False
    for name in names:
        match = re.fullmatch(r"host_state/(\d+)/marker\.json", name)
        if match is None:
            continue
        known = True
        step = int(match[1])
        data = store.read(name)
        if sha(data) in damaged or f"host_state/{step}/rolled_back.json" in there:
            continue
        if isinstance(store, BucketStore):
            committed = {f"{step}/commit_success.txt", f"{step}/default/commit_success.txt"}
        else:
            committed = {f"{step}/_CHECKPOINT_METADATA", f"{step}/default/manifest.ocdbt"}
        document = json.loads(data)
        fields = document.get("marker", document)
        life, count = _life_of(lives, fields["save"]["incarnation"]), len(fields["digests"])
        committed |= {
            f"host_state/{step}/process_{owner:05d}_of_{count:05d}.json" for owner in range(count)
        }
        if committed <= there and life is not None:
            whole.add(Save(step, life))
    return StoreLook(whole, known or bool(bare), frozenset(bare))
