"""Faults at rest: what is done to ramdisks and storage while no process of the job runs.

Every function returns a text of what it did, or "" where there was nothing to do it to.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from format_reader import read_ramdisk
from soak_looks import DirectoryStore, Store, is_ledger_damaged, marker_name, sha
from soak_plan import Fault

_FOREIGN = (b"", b"{}", b"null", b"\xff\xfe\x00", b"[" * 2000, b'{"format":1}', b"x" * 5000)


class Rest:
    """The directories of a job whose processes are gone, and what was damaged there.

    Attributes:
      hosts: ramdisk of each host. run_id: of the job. store: None without a persistent directory.
      damaged: digests of files that the soak wrote, and of markers of the steps that it damaged.
      knew: the process directories whose ledger named a complete step before it was damaged.
    """

    def __init__(self, hosts: Mapping[int, Path], run_id: str, store: Store | None) -> None:
        self.hosts, self.run_id, self.store = hosts, run_id, store
        self.damaged: set[str] = set()
        self.knew: set[Path] = set()

    def note_known(self) -> None:
        """Note which processes know of a complete step. Call before anything is damaged."""
        found = [p for path in self.hosts.values() for p in read_ramdisk(path, self.run_id)]
        knowing = {process.path for process in found if process.complete is not None}
        damaged = {process.path for process in found if is_ledger_damaged(process)}
        self.knew = knowing | self.knew & damaged

    def files(self) -> list[Path]:
        """All files of the run on the ramdisks, without locks."""
        found = [
            path
            for ramdisk in self.hosts.values()
            for path in (ramdisk / self.run_id).rglob("*")
            if path.is_file() and not path.is_symlink() and path.suffix != ".lock"
        ]
        return sorted(found)

    def wipe(self, hosts: list[int]) -> str:
        for host in hosts:
            for path in self.hosts[host].iterdir():
                shutil.rmtree(path)
        return f"hosts {hosts}"

    def note(self, data: bytes) -> None:
        self.damaged.add(sha(data))


def _altered(fault: Fault, data: bytes) -> bytes:
    """One bit turned over, in the first half more often: small files have all of theirs there."""
    if not data:
        return b"x"
    position = int(fault.numbers[1] * len(data))
    bit = 1 << int(fault.numbers[2] * 8)
    return data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]


def ram_bit_flip(rest: Rest, fault: Fault) -> str:
    files = rest.files()
    if fault.numbers[3] < 0.6:  # small files are many, and most of the bytes are in slots
        files = [path for path in files if path.suffix == ".bin"]
    if not files:
        return ""
    path = fault.pick(0, files)
    data = path.read_bytes()
    if path.suffix == ".bin":  # the bytes of shards are at its start, and few
        head = data.rstrip(b"\0") or data
        data = _altered(fault, head) + data[len(head) :]
    else:
        data = _altered(fault, data)
        rest.note(data)
    path.write_bytes(data)
    return _named(rest, path)


def _named(rest: Rest, path: Path) -> str:
    (host,) = (host for host, root in rest.hosts.items() if path.is_relative_to(root))
    return f"host {host}: {path.relative_to(rest.hosts[host] / rest.run_id)}"


def ram_truncated(rest: Rest, fault: Fault) -> str:
    files = rest.files()
    if not files:
        return ""
    path = fault.pick(0, files)
    size = path.stat().st_size
    os.truncate(path, int(fault.numbers[1] * size))
    if path.suffix != ".bin":
        rest.note(path.read_bytes())
    return _named(rest, path)


def ram_foreign(rest: Rest, fault: Fault) -> str:
    """Other bytes, another file, a directory, a link or a pipe in place of a file; or a new one."""
    files = rest.files()
    if not files:
        return ""
    path, other = fault.pick(0, files), fault.pick(1, files)
    what = fault.pick(2, ("bytes", "file", "directory", "link", "pipe", "more"))
    data = fault.pick(3, _FOREIGN)
    if what == "file":
        data = other.read_bytes()
    if what == "more":
        path = path.with_name(
            fault.pick(4, ("process_99999", "slot_9.manifest.json", ".tmp-x", "x"))
        )
        if path.exists():
            return ""
    elif what != "bytes":
        path.unlink()
    if what == "directory":
        path.mkdir()
    elif what == "link":
        path.symlink_to(other)
    elif what == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.write_bytes(data)
        path.chmod(0o600)
        if data != other.read_bytes() or path != other:
            rest.note(data)
    return f"{what}: {_named(rest, path)}"


def ram_directory_removed(rest: Rest, fault: Fault) -> str:
    found = sorted(
        path
        for root in rest.hosts.values()
        for path in [*(root / rest.run_id).rglob("*"), root / rest.run_id]
        if path.is_dir()
    )
    if not found:
        return ""
    path = fault.pick(0, found)
    shutil.rmtree(path)
    return str(path)


def ram_file_times(rest: Rest, fault: Fault) -> str:
    """Times of files as after a jump of the clock, up to ten years either way."""
    chance = random.Random(fault.numbers[0])
    for path in rest.files():
        time_s = path.stat().st_mtime + chance.uniform(-3e8, 3e8)
        os.utime(path, (time_s, time_s))
    return "times of all files"


def hosts_wiped(rest: Rest, fault: Fault) -> str:
    hosts = sorted(rest.hosts)
    return rest.wipe([hosts[n] for n in fault.some(0, len(hosts))])


def all_ram_wiped(rest: Rest, fault: Fault) -> str:
    del fault
    return rest.wipe(sorted(rest.hosts))


def _damage_step(rest: Rest, name: str) -> None:
    """Note that the step of a file in storage is damaged, as its marker is now."""
    assert rest.store is not None
    first, _, others = name.partition("/")
    step = others.partition("/")[0] if first == "host_state" else first
    if step.isdigit() and marker_name(int(step)) in rest.store.names():
        rest.note(rest.store.read(marker_name(int(step))))


def _stored(rest: Rest, fault: Fault, *, markers: bool = False) -> str | None:
    assert rest.store is not None
    names = rest.store.names()
    if markers:
        names = [name for name in names if name.endswith(("marker.json", "commit_success.txt"))]
    return fault.pick(0, names) if names else None


def storage_bit_flip(rest: Rest, fault: Fault, *, markers: bool = False) -> str:
    name = _stored(rest, fault, markers=markers)
    if name is None:
        return ""
    assert rest.store is not None
    return _write(rest, name, _altered(fault, rest.store.read(name)))


def _write(rest: Rest, name: str, data: bytes) -> str:
    assert rest.store is not None
    _damage_step(rest, name)
    rest.store.write(name, data)
    rest.note(data)
    return name


def storage_truncated(rest: Rest, fault: Fault, *, markers: bool = False) -> str:
    name = _stored(rest, fault, markers=markers)
    if name is None:
        return ""
    assert rest.store is not None
    data = rest.store.read(name)
    return _write(rest, name, data[: int(fault.numbers[1] * len(data))])


def storage_foreign(rest: Rest, fault: Fault, *, markers: bool = False) -> str:
    """Other bytes in place of a file, or a new one, or a folder with a number for its name."""
    name = _stored(rest, fault, markers=markers)
    if name is None:
        return ""
    assert rest.store is not None
    if not markers and fault.numbers[2] < 0.3:
        number = int(fault.numbers[3] * 1e6)
        name = f"{number}/{fault.pick(4, ('x', '_METADATA', 'state/manifest.ocdbt'))}"
        if isinstance(rest.store, DirectoryStore):
            (rest.store.root / name).parent.mkdir(parents=True, exist_ok=True)
    return _write(rest, name, fault.pick(3, _FOREIGN))


def storage_step_removed(rest: Rest, fault: Fault) -> str:
    """A folder of a step is removed: its tensors, its documents, or a file of either."""
    name = _stored(rest, fault)
    if name is None:
        return ""
    assert rest.store is not None
    first, _, others = name.partition("/")
    folder = f"{first}/{others.partition('/')[0]}/" if first == "host_state" else f"{first}/"
    whole = fault.numbers[1] < 0.6
    _damage_step(rest, name)
    for each in rest.store.names():
        if each == name or (whole and each.startswith(folder)):
            rest.store.remove(each)
    return f"removed {folder if whole else name}"


def storage_stripped(rest: Rest, fault: Fault) -> str:
    """All files of one sort are gone, of every step, as after a clean-up by a stranger."""
    assert rest.store is not None
    names = rest.store.names()
    gone = [name for name in names if _is_stripped(name, fault.text)]
    for name in gone:
        _damage_step(rest, name)
    for name in gone:
        rest.store.remove(name)
    return f"removed {fault.text}: {len(gone)} of {len(names)} files" if gone else ""


def _is_stripped(name: str, sort: str) -> bool:
    first, _, others = name.partition("/")
    is_log = first == "host_state" and others.startswith("log/")
    is_document = first == "host_state" and others[:1].isdigit()
    match sort:
        case "tensors":
            return first[:1].isdigit()
        case "documents":
            return is_document
        case "markers":
            return is_document and name.endswith("/marker.json")
        case "host_state":
            return first == "host_state"
        case "log":
            return is_log
        case _:
            return not is_log


def marker_damaged(rest: Rest, fault: Fault) -> str:
    damage: Callable[..., str] = fault.pick(
        5, (storage_bit_flip, storage_truncated, storage_foreign)
    )
    return damage(rest, fault, markers=True)


DAMAGES: Mapping[str, Callable[[Rest, Fault], str]] = {
    each.__name__: each
    for each in (
        hosts_wiped,
        all_ram_wiped,
        ram_bit_flip,
        ram_truncated,
        ram_foreign,
        ram_directory_removed,
        ram_file_times,
        storage_bit_flip,
        storage_truncated,
        storage_foreign,
        storage_step_removed,
        storage_stripped,
        marker_damaged,
    )
}
