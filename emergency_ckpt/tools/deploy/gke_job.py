"""The description of a job on GKE: the values of a template's placeholders, and their faults."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from emergency_ckpt.core.limits import NAME_PATTERN
from emergency_ckpt.core.placement.placement_policies import ALL_BUT_PRIMARY
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.tools.deploy.tpus import (
    ACCELERATORS,
    MACHINES,
    devices_per_chip,
    tpu_problems,
)
from emergency_ckpt.tools.placement_study import SLOTS, held_bytes, stored_share

_NAME_SUFFIX_CHARS = len("-slice-999-9999-abcde")
_LABEL_LIMIT_CHARS = 63
_NODE_POOL = "cloud.google.com/gke-nodepool"
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class GkeJob:
    """A job of equal slices on GKE.

    Attributes:
      name: of the JobSet; the other objects are called after it.
      program: the program of each process, and its arguments.
      directory: persistent directory, a ``gs://`` URL.
      run_id: None: ``name``.
      hosts: of each slice; each runs one process.
      machine_type: one of ``tpus.MACHINES[tpu_type]``; None: the default one.
      state_bytes: one replica of the training state.
      host_state_bytes: of each process; each slice holds a copy of each.
      ramdisk_bytes: of each host.
      memory_bytes: memory limit of a pod, in which the ramdisk counts. None: no limit.
      secret: name of the Kubernetes Secret that has the run's secret under the key ``secret``.
      keep_steps: the job's setting ``local_keep_last_n``.
      placement: the job's setting of that name, as text.
      restart_agent_image: JobSet's in-place restart agent, for a template that names it.
    """

    name: str
    image: str
    program: tuple[str, ...]
    directory: str
    slices: int
    hosts: int
    tpu_type: str
    topology: str
    state_bytes: int
    ramdisk_bytes: int
    secret: str
    machine_type: str | None = None
    host_state_bytes: int = 0
    namespace: str = "default"
    run_id: str | None = None
    memory_bytes: int | None = None
    keep_steps: int = 1
    placement: str = ALL_BUT_PRIMARY
    restart_agent_image: str | None = None

    def problems(self, besides_bytes: int) -> list[str]:
        """Return every fault of the description, one line each.

        ``besides_bytes``: what else lies in a host's ramdisk.
        """
        return [
            *_name_problems(self),
            *tpu_problems(self.tpu_type, self.machine_type, self.topology, self.hosts),
            *_size_problems(self, besides_bytes),
        ]

    def values(self) -> dict[str, str | list[str] | None]:
        """Return the values of the placeholders; None for what this job does not have.

        For a job without faults.
        """
        machines = MACHINES[self.tpu_type]
        machine = self.machine_type or next(iter(machines))
        chips = machines[machine]
        memory = None if self.memory_bytes is None else format_quantity(self.memory_bytes)
        return {
            "NAME": self.name,
            "NAMESPACE": self.namespace,
            "IMAGE": self.image,
            "PROGRAM": list(self.program),
            "DIR": self.directory,
            "BUCKET": self.directory.removeprefix("gs://").partition("/")[0],
            "RUN_ID": self.run_id or self.name,
            "SECRET": self.secret,
            "SLICES": str(self.slices),
            "HOSTS": str(self.hosts),
            "PROCESSES": str(self.slices * self.hosts),
            "ACCELERATOR": ACCELERATORS[self.tpu_type],
            "TOPOLOGY": self.topology,
            # A topology may be had of several machine types: 2x4 is two hosts, or one.
            "MACHINE": machine,
            "CHIPS": str(chips),
            "DEVICES": str(chips * devices_per_chip(self.tpu_type)),
            # One slice is one node pool, and no other slice's pods go there. Slices of one host
            # share a pool: each takes all chips of its node.
            "POOL_LABEL": _NODE_POOL if self.hosts > 1 else None,
            "STATE_GIB": f"{self.state_bytes / (1 << 30):.6g}",
            "HOST_STATE_MIB": f"{self.host_state_bytes / (1 << 20):.6g}",
            "RAMDISK": format_quantity(self.ramdisk_bytes),
            "RAMDISK_BYTES": str(self.ramdisk_bytes),
            "MEMORY": memory,
            "PLACEMENT": self.placement,
            "KEEP_STEPS": str(self.keep_steps),
            "RESTART_AGENT_IMAGE": self.restart_agent_image,
        }


def format_quantity(size_bytes: int) -> str:
    """Return a size as Kubernetes writes it: the shortest with a binary unit that is exact."""
    for power, prefix in reversed(tuple(enumerate("KMGTP", start=1))):
        if size_bytes % (1 << (10 * power)) == 0:
            return f"{size_bytes >> (10 * power)}{prefix}i"
    return str(size_bytes)


def _name_problems(job: GkeJob) -> list[str]:
    problems: list[str] = []
    longest = _LABEL_LIMIT_CHARS - _NAME_SUFFIX_CHARS
    if not _LABEL.fullmatch(job.name) or len(job.name) > longest:
        problems.append(
            f"--name {job.name!r} must be 1 to {longest} of a-z, 0-9 and -, and begin with a"
            " letter, because pods and their host names are called after it"
        )
    if not _LABEL.fullmatch(job.namespace) or len(job.namespace) > _LABEL_LIMIT_CHARS:
        problems.append(f"--namespace {job.namespace!r} is not a name of a namespace")
    if not job.secret:
        problems.append(
            "no secret: give --secret NAME of a Kubernetes Secret that has the run's secret under"
            " the key 'secret' (kubectl create secret generic NAME --from-file=secret=FILE)"
        )
    elif not _SUBDOMAIN.fullmatch(job.secret):
        problems.append(f"--secret {job.secret!r} is not a name of a Secret")
    if NAME_PATTERN.fullmatch(job.run_id or job.name) is None:
        problems.append(f"--run-id {job.run_id or job.name!r} must match {NAME_PATTERN.pattern}")
    if not job.program:
        problems.append("no program was given: write it after --")
    for option, image in (
        ("--image", job.image),
        ("--restart-agent-image", job.restart_agent_image or "-"),
    ):
        if not image or any(character.isspace() for character in image):
            problems.append(f"{option} {image!r} is not a name of an image")
    if not re.fullmatch(r"gs://[a-z0-9][-a-z0-9_.]*(/[^\\*?\[\]\s]+)", job.directory):
        problems.append(f"--dir {job.directory!r} must be a directory in a bucket: gs://bucket/run")
    return problems


def _size_problems(job: GkeJob, besides_bytes: int) -> list[str]:
    problems = [
        f"{option} must be {least} to {most}, not {value}"
        for option, value, least, most in (
            ("--slices", job.slices, 1, 999),
            ("--hosts", job.hosts, 1, 9999),
            ("--local-keep-last-n", job.keep_steps, 1, 64),
        )
        if not least <= value <= most
    ]
    if problems:
        return problems
    try:
        share = stored_share(parse_placement(job.placement), job.slices)
    except ConfigError as error:
        return [*error.problems]
    slots = SLOTS - 1 + job.keep_steps  # one is written while those that are kept stay whole
    slot = math.ceil(job.state_bytes / job.hosts * share)
    needed_bytes = math.ceil(held_bytes(slot, job.host_state_bytes, job.slices - 1, slots))
    needed_bytes += besides_bytes
    log_text = f", and {format_quantity(besides_bytes)} of event log" if besides_bytes else ""
    if job.ramdisk_bytes < needed_bytes:
        problems.append(
            f"a ramdisk of {format_quantity(job.ramdisk_bytes)} is smaller than the saves need:"
            f" {format_quantity(needed_bytes)} on each host, for {job.keep_steps + 1} slots"
            f" of its part of {format_quantity(job.state_bytes)} with {job.placement}, each with"
            f" {job.slices} host states of {format_quantity(job.host_state_bytes)}{log_text}"
        )
    if job.memory_bytes is not None and job.memory_bytes <= job.ramdisk_bytes:
        problems.append(
            f"a memory limit of {format_quantity(job.memory_bytes)} must be more than the ramdisk,"
            f" {format_quantity(job.ramdisk_bytes)}: what a pod writes there counts as its memory"
        )
    return problems
