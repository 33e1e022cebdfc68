"""Checks of the local directory: its file system, its owner, its room, and the memory behind it."""

from __future__ import annotations

import os
from pathlib import Path

from emergency_ckpt import files
from emergency_ckpt.core.memory_limit import MemoryLimit, fits_limits, tightest
from emergency_ckpt.core.wording import size_text
from emergency_ckpt.ram.host_memory import RAM_FILE_SYSTEMS, Mount, memory_limits, mount_of
from emergency_ckpt.ram.other_runs import left_runs
from emergency_ckpt.ram.ownership import open_local_dir, open_run_directory
from emergency_ckpt.tools.cli.doctor.findings import Finding

_MEMORY = Path("/proc/meminfo")
_SHMEM_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_LARGE = frozenset({"always", "within_size", "advise"})


def check_ramdisk(
    local_dir: Path, run_id: str | None, needed_bytes: int | None, spare_bytes: int = 0
) -> list[Finding]:
    """Return the findings about a local directory, which need not exist.

    ``needed_bytes``: of the processes on this host, slots and host states; None when the size is
    not known. ``spare_bytes``: of one slot more for each of them.
    """
    mount = mount_of(str(local_dir))
    held_bytes, others_bytes = _held(local_dir, run_id)
    return [
        _file_system(local_dir, mount),
        _owner(local_dir, run_id),
        _room(local_dir, needed_bytes, spare_bytes, held_bytes, others_bytes),
        _pages(mount),
        _memory(mount, needed_bytes, held_bytes),
    ]


def _file_system(local_dir: Path, mount: Mount | None) -> Finding:
    kind = mount.kind if mount else "an unknown file system"
    if mount is not None and kind in RAM_FILE_SYSTEMS:
        return Finding("ramdisk", "ok", f"{local_dir} lies on {kind}, mounted at {mount.point}")
    mend = "Mount a tmpfs there, or take a directory on one, such as /dev/shm/eckpt."
    return Finding(
        "ramdisk",
        "failure" if mount else "warning",
        f"{local_dir} lies on {kind}, not on tmpfs: saves to RAM would wait for a disk",
        mend,
    )


def _owner(local_dir: Path, run_id: str | None) -> Finding:
    try:
        there = _nearest(local_dir)
        if there != local_dir:
            # A start makes the missing directories itself.
            if not os.access(there, os.W_OK | os.X_OK):
                raise PermissionError(13, f"it is missing, and {there} is closed to this user")
            text = f"{local_dir} is missing; a start makes it in {there}"
            return Finding("owner", "ok", text)
        os.close(open_local_dir(local_dir))
        if not os.access(local_dir, os.W_OK | os.X_OK):
            raise PermissionError(13, "this user may not write in it", str(local_dir))
        if run_id is not None and (local_dir / run_id).exists():
            os.close(open_run_directory(local_dir / run_id))
    except OSError as error:
        mend = error.hint if isinstance(error, files.NotOwn) else "give it to the job's user"
        where = error.filename or local_dir
        text = f"{where}: {error.strerror or error}"
        return Finding("owner", "failure", text, _sentence(mend))
    status = local_dir.stat()
    text = f"{local_dir} belongs to user {status.st_uid}, mode {status.st_mode & 0o7777:04o}"
    return Finding("owner", "ok", text)


def _room(
    local_dir: Path, needed_bytes: int | None, spare_bytes: int, held_bytes: int, others_bytes: int
) -> Finding:
    status = os.statvfs(_nearest(local_dir))
    free_bytes, total_bytes = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    measured = {
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "held_by_this_run_bytes": held_bytes,
        "held_by_other_runs_bytes": others_bytes,
    }
    held = f", {size_text(held_bytes)} held by this run" if held_bytes else ""
    there = f"{size_text(free_bytes)} free of {size_text(total_bytes)}{held}"
    if needed_bytes is None:
        mend = "Give --state-gib, or --dir with a step in it, to have the room checked."
        return Finding("room", "warning", f"{there}; the size of the state is unknown", mend)
    text = f"{there}; this host's slots and host states take {size_text(needed_bytes)}"
    measured["needed_bytes"], measured["spare_bytes"] = needed_bytes, spare_bytes
    left_bytes = free_bytes + held_bytes - needed_bytes
    if left_bytes >= spare_bytes:
        return Finding("room", "ok", text, measured=measured)
    if left_bytes >= 0:
        mend = (
            f"With {size_text(spare_bytes - left_bytes)} more, arrays of a restore on CPU and saves"
            " to storage use a spare slot; without it both copy."
        )
        return Finding("room", "warning", text, mend, measured)
    missing_bytes = needed_bytes - free_bytes - held_bytes
    mend = f"Enlarge the ramdisk by {size_text(missing_bytes)}: mount -o remount,size=..."
    if others_bytes:
        mend += f" Other runs hold {size_text(others_bytes)} of it: see 'eckpt doctor --clean'."
    return Finding("room", "failure", text, mend, measured)


def _pages(mount: Mount | None) -> Finding:
    if mount is None or mount.kind != "tmpfs":
        return Finding("pages", "ok", "only a tmpfs has a choice of pages")
    wanted, forced = mount.option("huge"), _kernel_choice()
    if forced == "deny":
        mend = f"echo never > {_SHMEM_PAGES}, and mount the tmpfs with huge=within_size."
        return Finding("pages", "warning", "the kernel denies large pages to every tmpfs", mend)
    if wanted in _LARGE or forced == "force":
        return Finding("pages", "ok", f"the tmpfs has large pages (huge={wanted or forced})")
    text = f"{mount.point} has pages of 4 KiB (huge={wanted or 'never'})"
    mend = (
        "Mount a tmpfs with huge=within_size: a first save, a check and a restore after a loss"
        " then cost several times less CPU."
    )
    return Finding("pages", "warning", text, mend)


def _memory(mount: Mount | None, needed_bytes: int | None, held_bytes: int) -> Finding:
    limits = [_host_limit(), *memory_limits()]
    least = tightest(limits) or limits[0]
    text = f"{size_text(least.left_bytes)} of memory available ({least.name})"
    measured = {"available_bytes": least.left_bytes}
    if needed_bytes is None or mount is None or mount.kind not in RAM_FILE_SYSTEMS:
        return Finding("memory", "ok", text, measured=measured)
    new_bytes = max(needed_bytes - held_bytes, 0)
    if fits_limits(new_bytes, limits)[0]:
        return Finding("memory", "ok", text, measured=measured)
    mend = (
        f"The slots take {size_text(new_bytes)} of it: give the host or its container more memory,"
        " or store fewer copies (placement striped(2))."
    )
    return Finding("memory", "failure", text, mend, measured)


def _host_limit() -> MemoryLimit:
    """Return what the kernel says is available, page cache included, the files of a tmpfs not."""
    for line in _MEMORY.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return MemoryLimit("the host", int(value.split()[0]) << 10)
    return MemoryLimit("the host", 0)


def _held(local_dir: Path, run_id: str | None) -> tuple[int, int]:
    """Return the bytes that this run's directories hold, and those of all other runs."""
    try:
        runs = left_runs(local_dir)
    except OSError:
        return 0, 0  # it does not exist, or the check of the owner names the reason
    mine = sum(run.size_bytes for run in runs if run.run_id == run_id)
    return mine, sum(run.size_bytes for run in runs) - mine


def _nearest(path: Path) -> Path:
    """Return ``path``, or the nearest directory above it that exists."""
    return next(each for each in (path, *path.parents) if each.is_dir())


def _kernel_choice() -> str:
    try:
        text = _SHMEM_PAGES.read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
