"""Faults of a running job: signals, full and absent disks, faults of a bucket's server."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fake_gcs import FakeGcsError, FaultRule
from soak_life import RunningLife
from soak_plan import Fault
from soak_program import KillAt, Order

RAMDISK_BYTES, STORAGE_BYTES = 24 << 20, 48 << 20
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000


def own_mounts() -> bool:
    """Give this process and its children mounts of their own; False where that is not allowed.

    They vanish with the last of these processes. Root is not needed where users may make name
    spaces.
    """
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | (0 if user == 0 else _CLONE_NEWUSER)) != 0:
        return False
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    private = ["mount", "--make-rprivate", "/"]
    return subprocess.run(private, check=False, capture_output=True).returncode == 0


def mount_small(path: Path, size_bytes: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path], check=True)


def fill(directory: Path, left_bytes: int) -> None:
    """Leave ``left_bytes`` of a file system's room."""
    with (directory / "ballast").open("wb") as file:
        for _ in range(20):  # others write meanwhile
            room = os.statvfs(directory)
            size = room.f_bavail * room.f_frsize - left_bytes
            with contextlib.suppress(OSError):
                if size > 0:
                    os.posix_fallocate(file.fileno(), 0, size)
                return


def unfill(directory: Path) -> None:
    (directory / "ballast").unlink(missing_ok=True)


class Place:
    """The persistent directory as the faults see it: a folder that comes and goes, or a prefix."""

    def __init__(self, control: Any, prefix: str, folder: Path | None) -> None:
        self._control, self._prefix, self._folder = control, prefix, folder
        self._rules: list[int] = []
        self._is_away = False

    def vanish(self, fault: Fault) -> str:
        if self._folder is None:
            return self._rule("reset") if fault.numbers[5] < 0.5 else self._rule("status")
        if not self._folder.exists() or self._is_away:
            return ""
        away = self._folder.with_name("away")
        self._folder.rename(away)
        if fault.numbers[5] < 0.5:
            self._folder.write_bytes(b"")  # so that nobody makes it anew
        self._is_away = True
        return "away"

    def fill(self, fault: Fault) -> str:
        if self._folder is None:
            return self._rule("status", method="[DP]*", status_code=fault.pick(5, (403, 429, 507)))
        fill(self._folder.parent, fault.pick(5, (0, 4096, 100_000)))
        return "full"

    def trouble(self, fault: Fault) -> str:
        """Requests of a bucket that fail at random; a folder that is away for a moment."""
        if self._folder is None:
            kinds = ("status", "reset", "delay", "truncate", "lose_reply")
            texts = []
            for number in range(1 + int(3 * fault.numbers[4])):
                chance = random.Random(fault.numbers[3] + number)
                kind = chance.choice(kinds)
                skip, count = chance.randrange(20), chance.randint(1, 5)
                texts.append(self._rule(kind, skip=skip, count=count, delay_s=chance.random() / 2))
            return ", ".join(texts)
        said = self.vanish(fault)
        time.sleep(0.5 * fault.numbers[4])
        self.mend()
        return said and "away for a moment"

    def remove(self, fault: Fault) -> str:
        """Remove a step's folder, or everything."""
        if self._folder is None:
            names = self._control.object_names("bucket", self._prefix + "/")
            for name in names if fault.numbers[4] < 0.5 else names[::2]:
                try:
                    self._control.delete_object("bucket", name)
                except FakeGcsError as error:
                    if error.actual != 404:  # the job may have removed it since
                        raise
            return f"{len(names)} objects"
        found = sorted(path for path in self._folder.glob("*") if path.is_dir())
        path = self._folder if fault.numbers[4] < 0.3 or not found else fault.pick(3, found)
        shutil.rmtree(path, ignore_errors=True)
        return path.name

    def _rule(self, kind: Any, **more: Any) -> str:
        rule = FaultRule(kind=kind, target=f"bucket/{self._prefix}*", **more)
        self._rules.append(self._control.add_fault(rule))
        return kind

    def mend(self) -> None:
        """End every fault: what stands in the folder's place goes."""
        for rule in self._rules:
            self._control.remove_fault(rule)
        self._rules.clear()
        if self._folder is None:
            return
        unfill(self._folder.parent)
        if self._is_away:
            _put_back(self._folder.with_name("away"), self._folder)
            self._is_away = False


def _put_back(away: Path, folder: Path) -> None:
    """Give a folder its name back; what took that name goes, though processes still write there."""
    for number in range(100):
        with contextlib.suppress(FileNotFoundError):
            folder.rename(folder.with_name(f"instead_{number}"))
        try:
            away.rename(folder)
        except OSError:  # somebody has made it anew
            continue
        break
    for path in folder.parent.glob("instead_*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


class Trouble:
    """Carries out the faults of a running life.

    Attributes:
      did: what was done, by kind, with a few words.
      ram_hit, storage_hit: a fault has changed what is there, so that what was whole may be gone.
    """

    def __init__(self, hosts: Mapping[int, Path], run_id: str, place: Place | None) -> None:
        self._hosts, self._run_id, self._place = hosts, run_id, place
        self.did: dict[str, str] = {}
        self.ram_hit = self.storage_hit = False

    def note(self, fault: Fault, text: str) -> None:
        if text:
            self.did[fault.kind] = text

    def happen(self, life: RunningLife, fault: Fault, host_of: list[int]) -> None:
        """A fault that the life may survive. ``host_of``: of each process."""
        processes = fault.some(0, len(host_of))
        match fault.kind:
            case "freeze" | "freeze_in_restore":
                life.signal(processes, signal.SIGSTOP)
                pause_s = (0.1, 0.4, 1.0, 2.5)[int(4 * fault.numbers[1])] * fault.numbers[2]
                time.sleep(pause_s)
                life.signal(processes, signal.SIGCONT)
                self.note(fault, f"{processes} for {pause_s:.2f} s")
            case "ramdisk_full" | "ramdisk_full_at_start":
                for process in processes:
                    fill(self._hosts[host_of[process]], fault.pick(1, (0, 4096, 200_000)))
                self.ram_hit = True
                self.note(fault, f"hosts {[host_of[p] for p in processes]}")
            case "ramdisk_removed":
                for process in processes:
                    run = self._hosts[host_of[process]] / self._run_id
                    inner = sorted(path for path, _, _ in os.walk(run))  # while others write
                    if inner:
                        shutil.rmtree(fault.pick(1, inner), ignore_errors=True)
                self.ram_hit = True
                self.note(fault, f"hosts {[host_of[p] for p in processes]}")
            case _:
                self._storage(fault)

    def _storage(self, fault: Fault) -> None:
        assert self._place is not None
        match fault.kind:
            case "storage_absent" | "storage_absent_at_start":
                said = self._place.vanish(fault)
            case "storage_full":
                said = self._place.fill(fault)
            case "storage_faults" | "storage_faults_at_start":
                said = self._place.trouble(fault)
            case "storage_removed":
                said = self._place.remove(fault)
            case _:
                raise AssertionError(fault.kind)
        self.storage_hit = True
        self.note(fault, said)

    def mend(self) -> None:
        for path in self._hosts.values():
            unfill(path)
        if self._place is not None:
            self._place.mend()


def instruct(orders: list[Order], fault: Fault, steps: int) -> None:
    """Tell the processes what they have to know of a fault at their start."""
    victim = int(fault.numbers[1] * len(orders))
    for index, order in enumerate(orders):
        change: dict[str, Any] = {}
        match fault.kind:
            case "kill_at_event" | "kill_at_restore_event" if index == victim:
                in_restore = fault.kind == "kill_at_restore_event"
                times = 1 if in_restore else 1 + int(3 * fault.numbers[0])
                change["kill_at"] = KillAt(fault.text, times, in_restore)
            case "exception" if index == victim:
                change["raises_after"] = int(steps * fault.numbers[0])
            case "clock_jump":
                if fault.numbers[3] < 0.5 or index == victim:
                    change["clock_jump"] = (int(steps * fault.numbers[0]), clock_error_s(fault))
            case "clock_at_start":
                if fault.numbers[3] < 0.5 or index == victim:
                    change["clock_s"] = clock_error_s(fault)
            case "resets":
                change |= {
                    "resets": 1 + int(4 * fault.numbers[0]),
                    "chance": fault.numbers[2] + index,
                }
            case _:
                pass
        orders[index] = dataclasses.replace(order, **change)


def clock_error_s(fault: Fault) -> float:
    """A second, an hour, ten days or ten years, to either side."""
    sign = 1 if fault.numbers[4] < 0.5 else -1
    return sign * fault.pick(5, (1.0, 3600.0, 864e3, 3e8)) * fault.numbers[2]
