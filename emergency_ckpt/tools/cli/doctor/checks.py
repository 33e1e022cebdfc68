"""The checks of ``eckpt doctor``, each with a finding about one thing."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec
from packaging.requirements import Requirement

from emergency_ckpt import _native, files
from emergency_ckpt.core.address import parse_address, split_holder
from emergency_ckpt.core.wording import size_text
from emergency_ckpt.errors import CheckpointError, ConfigError
from emergency_ckpt.ram.host_memory import (
    RAM_FILE_SYSTEMS,
    MemoryLimit,
    Mount,
    fits_limits,
    memory_limits,
    mount_of,
    tightest,
)
from emergency_ckpt.ram.leftovers import left_runs
from emergency_ckpt.ram.ownership import open_local_dir, open_run_directory
from emergency_ckpt.run_secret import SECRET_VARIABLE, OwnSecret, own_secret
from emergency_ckpt.storage.directory import StorageDirectory, probe_storage
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.pool import UnprovedPeer

_DISTRIBUTION = "emergency-ckpt"
_NAMED = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy")
_AT_ONCE = 16
_COUNT = re.compile(r"(\d{1,6})(?:\(x\d{1,6}\))?", re.ASCII)
"""A number of Slurm's, equal on all nodes: ``8(x4)``."""
_MEMORY = Path("/proc/meminfo")
_SHMEM_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_LARGE = frozenset({"always", "within_size"})  # with "advise" a slot would have to ask for them


Status = Literal["ok", "warning", "failure"]


class Finding(msgspec.Struct, frozen=True):
    """One checked thing.

    Attributes:
      check: its name, one word.
      status: "failure": a job would fail at its start, or could not save or restore.
      text: the finding, one clause.
      mend: how to mend it, one sentence; empty when it is ok.
      measured: numbers with their units in their names.
    """

    check: str
    status: Status
    text: str
    mend: str = ""
    measured: Mapping[str, float] = {}


def check_versions() -> Finding:
    """Return the versions of Python and the packages; a failure when one is missing or too old.

    No package is imported for the check.
    """
    try:
        wanted = [Requirement(text) for text in metadata.requires(_DISTRIBUTION) or ()]
        own = metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        text = "emergency-ckpt runs from a source tree, so the versions it needs are not known"
        return Finding("versions", "warning", text, "Install it: pip install .")
    wrong: list[str] = []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(
                f"{requirement.name} is {version or 'missing'}, not {requirement.specifier}"
            )
    names = ", ".join(f"{name} {version}" for name in _NAMED if (version := _version(name)))
    text = f"emergency-ckpt {own}, Python {platform.python_version()}, {names}"
    if wrong:
        mend = f"{sys.executable} -m pip install --upgrade {_DISTRIBUTION}"
        return Finding("versions", "failure", "; ".join(wrong), mend)
    return Finding("versions", "ok", text)


def check_devices(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a warning where Slurm gave this node more GPUs than its tasks will use.

    ``jax.distributed.initialize`` takes one GPU for each task of Slurm, unless
    JAX_LOCAL_DEVICE_IDS names more.
    """
    gpus = _COUNT.fullmatch(environ.get("SLURM_GPUS_ON_NODE", ""))
    tasks = _COUNT.fullmatch(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if gpus is None or tasks is None or "JAX_LOCAL_DEVICE_IDS" in environ:
        return
    gpu_count, task_count = int(gpus[1]), int(tasks[1])
    if task_count < gpu_count:
        yield Finding(
            "devices",
            "warning",
            f"Slurm gave this node {gpu_count} GPUs and {task_count} tasks; JAX takes one GPU for"
            " each task, and the others do nothing",
            f"Start a task for each GPU (--ntasks-per-node={gpu_count}), or let one task take all"
            f" (JAX_LOCAL_DEVICE_IDS=0,...,{gpu_count - 1}).",
        )


def check_link() -> Finding:
    """Find out what JAX's devices can do with host memory. Initialises JAX, and takes the devices.

    A warning where bytes do not go directly, which costs time only.
    """
    # Not imported without being asked for: the devices of a job that runs here are its own.
    from emergency_ckpt.state.link import find_link  # noqa: PLC0415

    try:
        facts = find_link().facts
    except RuntimeError as error:  # JAX's, for a device that it cannot take
        text = f"JAX cannot take the devices: {error}"
        mend = "Look at JAX_PLATFORMS, and whether another process has the devices."
        return Finding("link", "failure", text, mend)
    measured = {"gb_per_s": round(facts.gb_s, 1)}
    text = f"{facts.device} ({facts.platform}): arrays leave by the way {facts.way!r}"
    if facts.gb_s:
        text += f", {facts.gb_s:.1f} GB/s"
    text += f"; host memory is {'' if facts.maps else 'not '}mapped"
    if facts.why and facts.way != "views":
        mend = "Raise the limit of locked memory (`ulimit -l`), and see docs/ram_and_storage.md."
        return Finding("link", "warning", f"{text}: {facts.why}", mend, measured)
    return Finding("link", "ok", text, measured=measured)


def check_engine() -> Finding:
    """Return how the native engine computes CRC32Cs."""
    kind = _native.implementation()
    if kind == "portable":
        mend = "Run on a processor with SSE 4.2 or ARMv8 CRC instructions; saves take longer here."
        return Finding("engine", "warning", f"CRC32C by {kind}", mend)
    return Finding("engine", "ok", f"CRC32C by {kind}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_secret(
    secret_file: str | None, environ: Mapping[str, str]
) -> tuple[Finding, OwnSecret | None]:
    """Return the finding about the run's secret, and the secret when it can be used."""
    try:
        secret = own_secret(secret_file, environ)
    except ConfigError as error:
        mend = "chmod 600 it; a secret has 32 to 4096 bytes (see docs/security.md)."
        return Finding("secret", "failure", "; ".join(error.problems), mend), None
    source = f"file {secret_file}" if secret_file else SECRET_VARIABLE
    if secret is not None and secret.kind == "given":
        return Finding("secret", "ok", f"{len(secret.value)} bytes from {source}"), secret
    text = "no secret is given: the processes make one up at each start"
    mend = f"Set secret_file or {SECRET_VARIABLE}; see docs/security.md."
    return Finding("secret", "warning", text, mend), secret


def check_peers(
    peers: Sequence[str], run_id: str | None, secret: OwnSecret | None, timeout_s: float
) -> list[Finding]:
    """Return a finding for each peer: reached, and with a run id and a secret also greeted.

    Blocks for at most ``timeout_s`` seconds for each 16 peers.
    """
    client = None
    if run_id is not None and secret is not None:
        client = TransferClient(run_id=run_id, secret=secret.value, connect_timeout_s=timeout_s)
    with client or contextlib.nullcontext(), ThreadPoolExecutor(_AT_ONCE, "eckpt-peers") as pool:
        looks = [pool.submit(_peer, peer, client, timeout_s) for peer in peers]
        return [look.result() for look in looks]


def _peer(peer: str, client: TransferClient | None, timeout_s: float) -> Finding:
    try:
        socket.create_connection(parse_address(split_holder(peer)[1]), timeout_s).close()
        if client is not None:
            client.greet(peer, timeout_s)
    except (CheckpointError, OSError) as error:
        problem = error.problem if isinstance(error, CheckpointError) else str(error)
        mend = "Start its server ('eckpt serve'), and let its port through firewalls and policies."
        if isinstance(error, UnprovedPeer):
            mend = "Give both sides the same secret and the same --run-id."
        return Finding("peer", "failure", f"{peer} cannot be reached: {problem}", mend)
    outcome = "reached and greeted"
    if client is None:
        outcome = "reached; not greeted (no secret or no --run-id)"
    return Finding("peer", "ok", f"{peer} {outcome}")


def check_storage(directory: str, name: str, timeout_s: float) -> Finding:
    """Write, read and remove a small file there. Blocks for ``timeout_s``.

    A missing directory is not made: it would hide that a file system is not mounted.

    Args:
      name: part of the file's name that nobody else uses.
    """
    storage = StorageDirectory(directory, timeout_s)
    deadline_s = time.monotonic() + timeout_s
    try:
        if not storage.is_object_store and not storage.lexists(""):
            mend = "If it has steps, mount its file system before the job starts."
            return Finding("storage", "warning", f"{directory} is missing; a start makes it", mend)
        probe_storage(storage, name, deadline_s, conditions=True)
    except CheckpointError as error:
        mend = _sentence(error.hint or "check that the directory is reachable and writable")
        problem = f"{error.operation} {error.target}: {error.problem}"
        return Finding("storage", "failure", problem, mend)
    honoured = "generation preconditions are" if storage.is_object_store else "'create if new' is"
    text = f"{directory} takes, returns and removes a file, and {honoured} honoured"
    return Finding("storage", "ok", text)


def newest_state_bytes(directory: str, timeout_s: float) -> tuple[Finding, int | None]:
    """Return the size of the newest step of this package, of one replica, or None without one."""
    # Orbax, which these import, takes a second to load.
    from emergency_ckpt.storage.steps import StoredSteps  # noqa: PLC0415

    try:
        table = StoredSteps(StorageDirectory(directory, timeout_s)).view().table
    except CheckpointError as error:
        return Finding("state", "warning", str(error), "Give --state-gib."), None
    entries = [] if table is None else [e for e in table.counting() if not e.is_plain]
    if not entries:
        text = f"{directory} has no step from which the size of the state could be taken"
        return Finding("state", "warning", text, "Give --state-gib."), None
    newest = entries[-1]
    size_bytes = newest.size_bytes
    text = f"{size_text(size_bytes)}, as step {newest.step} in {directory}"
    return Finding("state", "ok", text, measured={"state_bytes": size_bytes}), size_bytes


def check_ramdisk(
    local_dir: Path, run_id: str | None, needed_bytes: int | None, spare_bytes: int
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
        check_pages(mount),
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
        if there != local_dir and os.path.lexists(local_dir):
            raise NotADirectoryError(errno.ENOTDIR, "it is no directory", str(local_dir))
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
    place = _nearest(local_dir)
    status, free_bytes = os.statvfs(place), files.free_bytes(place)
    total_bytes = status.f_blocks * status.f_frsize
    measured = {
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "held_by_this_run_bytes": held_bytes,
        "held_by_other_runs_bytes": others_bytes,
    }
    held_text = f", {size_text(held_bytes)} held by this run" if held_bytes else ""
    free_text = f"{size_text(free_bytes)} free of {size_text(total_bytes)}"
    there = f"{free_text if total_bytes else 'no limit of its size'}{held_text}"
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
            f"With {size_text(spare_bytes - left_bytes)} more, a process that writes to storage"
            " has a spare slot; without it the process copies."
        )
        return Finding("room", "warning", text, mend, measured)
    mend = f"Enlarge the ramdisk by {size_text(-left_bytes)}: mount -o remount,size=..."
    if others_bytes:
        mend += f" Other runs hold {size_text(others_bytes)} of it: see 'eckpt doctor --clean'."
    return Finding("room", "failure", text, mend, measured)


def check_pages(mount: Mount | None, chosen: Path = _SHMEM_PAGES) -> Finding:
    """Return the finding about the pages of a ramdisk, which a mount asks for.

    ``chosen``: the kernel's file that may deny large pages to every mount, or force them on each.
    """
    if mount is None or mount.kind != "tmpfs":
        return Finding("pages", "ok", "only a tmpfs has a choice of pages")
    wanted = mount.option("huge")
    kernel = ""
    with contextlib.suppress(OSError):  # a kernel without large pages has no such file
        kernel = chosen.read_text()
    if "[force]" in kernel:
        return Finding("pages", "ok", "the kernel forces large pages on every tmpfs")
    if "[deny]" in kernel:
        mend = f"Mount the tmpfs with huge=within_size, and: echo never > {chosen}"
        return Finding("pages", "warning", "the kernel denies large pages to every tmpfs", mend)
    if wanted in _LARGE:
        return Finding("pages", "ok", f"the tmpfs has large pages (huge={wanted})")
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
    """Return ``path``, or the nearest directory above it that this user can see."""
    # Not by Path.is_dir, which raises an error below a directory that is closed to this user.
    return next(directory for directory in (path, *path.parents) if os.path.isdir(directory))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
