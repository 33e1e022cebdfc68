"""The environment variables by which a process of a job finds its place, whoever starts it.

An engine's template sets them, and so does ``eckpt launch``. It does not import JAX.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from emergency_ckpt.errors import ConfigError

_PREFIX = "ECKPT_"
HOST_INDEX_VARIABLE = f"{_PREFIX}HOST_INDEX"


@dataclass(frozen=True)
class JobEnvironment:
    """The place of one process in a job.

    Attributes:
      coordinator_address: ``host:port`` of JAX's coordination service in process 0. New in each
        life.
      process_index, process_count: this process, and their number. A host may get another index in
        the next life.
      slice_index: ``process_index // (process_count // slice_count)``, because JAX on CPU orders
        devices by process index.
      slice_count: number of slices in the job.
      devices_per_host: number of CPU devices that this process makes.
      local_dir: this host's ramdisk directory. It belongs to the host, not to the process index,
        and survives from one life to the next unless the host is lost.
      restart_count: 0 in the first life, one more in each later one.
      progress_path: the file that ``report_step`` writes; None without a supervisor.
      event_log: the directory of the job's event log, which the extra ``event_log`` takes where it
        is given none; None without one.
    """

    coordinator_address: str
    process_index: int
    process_count: int
    slice_index: int
    slice_count: int
    devices_per_host: int
    local_dir: Path
    restart_count: int = 0
    progress_path: Path | None = None
    event_log: Path | None = None

    def __post_init__(self) -> None:
        problems = list(_inconsistencies(self))
        if problems:
            raise ConfigError(problems, target="the job environment")

    @property
    def hosts_per_slice(self) -> int:
        """Return the number of processes in each slice, one per host."""
        return self.process_count // self.slice_count

    def to_environ(self) -> dict[str, str]:
        """Return the ``ECKPT_*`` variables from which ``from_environ`` makes an equal value."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {_variable(name): str(value) for name, value in values.items() if value is not None}

    def jax_environ(self) -> dict[str, str]:
        """Return the variables that make JAX a process of a CPU job on loopback.

        The bind address is needed: by default the coordination service listens on all interfaces.
        """
        return {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(self.devices_per_host),
            "JAX_COORDINATOR_BIND_ADDRESS": self.coordinator_address,
        }

    @staticmethod
    def present(environ: Mapping[str, str] = os.environ) -> bool:
        """Return True when a supervisor started this process."""
        return _variable("process_index") in environ

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> JobEnvironment:
        """Read the variables of ``to_environ``.

        Engines that number the hosts of each slice give ``ECKPT_HOST_INDEX`` instead of
        ``ECKPT_PROCESS_INDEX``: the index of this host in its slice.

        Raises:
          ConfigError: lists every variable that is missing or malformed.
        """
        environ, problems = _with_process_index(environ)
        values: dict[str, object] = {}
        for field in fields(cls):
            name, text = _variable(field.name), environ.get(_variable(field.name))
            if text is None:
                problems += [f"{name} is not set"] if field.default is MISSING else []
                continue
            try:
                values[field.name] = _PARSERS[str(field.type)](text)
            except ValueError:
                problems.append(f"{name} is malformed: {text!r}")
        if problems:
            raise ConfigError(problems, target="the job environment")
        return cls(**values)  # type: ignore[arg-type]


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


_PARSERS: Mapping[str, Callable[[str], object]] = {
    "str": str,
    "int": int,
    "Path": Path,
    "Path | None": Path,
}
"""The function that reads a variable, by the type of its field as ``JobEnvironment`` writes it."""


def _with_process_index(environ: Mapping[str, str]) -> tuple[Mapping[str, str], list[str]]:
    """Return ``environ`` with the process index that follows from the host index; and faults."""
    own, given = _variable("process_index"), environ.get(HOST_INDEX_VARIABLE)
    if own in environ or given is None:
        return environ, []
    names = ("slice_index", "slice_count", "process_count")
    try:
        slice_index, slices, count = (int(environ.get(_variable(name), "0")) for name in names)
    except ValueError:
        return {**environ, own: "0"}, []  # named as malformed with the other variables
    hosts = count // slices if slices > 0 else 0
    if not given.isdecimal() or not int(given) < hosts:
        return {**environ, own: "0"}, [f"{HOST_INDEX_VARIABLE} {given!r} is not in 0..{hosts - 1}"]
    return {**environ, own: str(slice_index * hosts + int(given))}, []


def _inconsistencies(env: JobEnvironment) -> list[str]:
    problems: list[str] = []
    host, colon, port = env.coordinator_address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        problems.append(f"coordinator_address must be host:port, got {env.coordinator_address!r}")
    if env.process_count < 1 or not 0 <= env.process_index < env.process_count:
        problems.append(f"process_index {env.process_index} is not in 0..{env.process_count - 1}")
    if env.slice_count < 1 or env.process_count % env.slice_count:
        problems.append(f"{env.process_count} processes cannot make {env.slice_count} slices")
    elif env.slice_index != env.process_index // env.hosts_per_slice:
        problems.append(f"slice_index {env.slice_index} does not follow from the process index")
    if env.devices_per_host < 1:
        problems.append(f"devices_per_host must be at least 1, got {env.devices_per_host}")
    if env.restart_count < 0:
        problems.append(f"restart_count must not be negative, got {env.restart_count}")
    return problems
