"""The description of a job on GKE, from which all manifests follow."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from emergency_ckpt.config import Config
from emergency_ckpt.core.limits import NAME_PATTERN
from emergency_ckpt.core.placement.placement_policies import ALL_BUT_PRIMARY
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.extras.event_log.log_writer import LOG_BYTES
from emergency_ckpt.tools.deploy.quantity import format_quantity
from emergency_ckpt.tools.deploy.tpus import (
    ACCELERATORS,
    MACHINES,
    devices_per_chip,
    machines_of,
    tpu_problems,
)
from emergency_ckpt.tools.placement_study import SLOTS, held_bytes, stored_share

RamdiskSource = Literal["daemonset", "in-place", "gke-driver"]
"""Where the ramdisk of a host comes from: a tmpfs that a DaemonSet mounts on the node; an emptyDir
of the pod, which outlives its containers; the volume of GKE's multi-tier checkpoint driver."""

MOUNT_IMAGE = (
    "python:3.12.11-slim-bookworm"
    "@sha256:519591d6871b7bc437060736b9f7456b8731f1499a57e22e6c285135ae657bf7"
)
"""The base of deploy/Dockerfile, whose layers a node has already."""

TpuRights = Literal["locked-memory", "none", "privileged"]
"""What a trainer's container may do to reach its TPU, whose driver maps memory of the host for DMA
and so has it locked: start as root with CAP_SYS_RESOURCE, raise the limit of locked memory, and go
on as the pod's user; nothing, on nodes that raise it themselves, as GKE's do since 1.28; or the
first as a privileged container."""

Effect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]

REPLICATED_JOB = "slice"
NODE_POOL = "cloud.google.com/gke-nodepool"
COORDINATOR_PORT = 8476
PEER_PORT = 7411
SERVE_PORT = 7412
METRICS_PORT = 7413
GOOGLE_PROMETHEUS = "gmp-system"
"""Namespace of the collectors of Google's Managed Service for Prometheus."""
GRACE_MARGIN_S = 5
"""Between the notice and the sync point: JAX looks for notices once a second, then a step ends."""
GRACE_S = Config.preemption_grace_s
SPOT_GRACE_S = 10.0
"""With the margin the 15 s that the kubelet of a spot node gives to pods, whatever they ask for."""

_NAME_SUFFIX_CHARS = len("-slice-999-9999-abcde")
_LABEL_LIMIT_CHARS = 63
_DAY_S = 86400
_SPOT = "cloud.google.com/gke-spot"
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_WORD}")
_LABEL_VALUE = re.compile(rf"({_WORD})?")


@dataclass(frozen=True, kw_only=True)
class GkeJob:
    """A job of equal slices on GKE.

    Attributes:
      name: of the JobSet; the other objects are called after it.
      command: the program of each process, and its arguments.
      directory: persistent directory, a ``gs://`` URL.
      run_id: None: ``name``.
      hosts: of each slice; each runs one process.
      machine_type: one of ``tpus.MACHINES``; None: the default one of ``tpu_type``.
      tpu_rights: of the trainer's container alone.
      spot, reservation: where the nodes are from; a reservation by its name.
      node_pools: those of the job, where others have nodes of the same kind.
      node_selector, tolerations: further labels of the nodes, and taints, as (key, value, effect);
        value None: any.
      host_network: trainers use the node's network, out of reach of network policies.
      prometheus_namespace: of what may read the trainers' metrics.
      state_bytes: one replica of the training state.
      host_state_bytes: of each process; each slice holds a copy of each.
      ramdisk_bytes: of each host.
      memory_bytes: memory limit of a pod, in which the ramdisk counts. None: no limit.
      secret_name: of the Kubernetes Secret with the run's secret under the key ``secret``.
      secret: the secret itself, for a manifest of it; None where the Secret exists already.
      queue: Kueue's queue; None without Kueue.
      keep_steps: the job's setting ``local_keep_last_n``.
      placement: the job's setting of that name, as text.
      preemption_grace_s, hang_timeout_s: the job's settings of these names. None: the default, or
        on spot nodes what they leave a pod.
      drain_s: with the DaemonSet, time in seconds without a process of the job after which its RAM
        is drained; in place, the longest time of that when the pods end.
      compilation_cache: directory or URL of JAX's compilation cache. By default the pod's own:
        whoever can write into the cache runs code in the trainers.
      restart_agent_image: JobSet's in-place restart agent; for the source ``in-place`` alone.
      mount_image: of the DaemonSet's privileged container, by its digest: what runs there for the
        node is not what a build of the trainer or a moved tag brings. It needs a shell and mount.

    Raises:
      ConfigError: lists every fault.
    """

    name: str
    image: str
    command: tuple[str, ...]
    directory: str
    slices: int
    hosts: int
    tpu_type: str
    topology: str
    state_bytes: int
    ramdisk_bytes: int
    ramdisk_source: RamdiskSource
    secret_name: str
    machine_type: str | None = None
    tpu_rights: TpuRights = "locked-memory"
    spot: bool = False
    reservation: str | None = None
    node_pools: tuple[str, ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[tuple[str, str | None, Effect], ...] = ()
    host_network: bool = False
    prometheus_namespace: str = GOOGLE_PROMETHEUS
    preemption_grace_s: float | None = None
    hang_timeout_s: float = 600.0
    drain_s: float = 900.0
    host_state_bytes: int = 0
    secret: bytes | None = field(default=None, repr=False)
    namespace: str = "default"
    run_id: str | None = None
    memory_bytes: int | None = None
    queue: str | None = None
    max_restarts: int = 10
    keep_steps: int = 1
    placement: str = ALL_BUT_PRIMARY
    restart_agent_image: str | None = None
    mount_image: str = MOUNT_IMAGE
    compilation_cache: str = "/tmp/jax-cache"  # noqa: S108  the pod's own

    def __post_init__(self) -> None:
        problems = [
            *_name_problems(self),
            *tpu_problems(self.tpu_type, self.machine_type, self.topology, self.hosts),
            *_node_problems(self),
            *_program_problems(self),
            *_size_problems(self),
        ]
        if problems:
            raise ConfigError(problems, target="the job on GKE")

    @property
    def run_name(self) -> str:
        """The run id."""
        return self.run_id or self.name

    @property
    def process_count(self) -> int:
        """Number of processes, one on each host."""
        return self.slices * self.hosts

    @property
    def coordinator_address(self) -> str:
        """Address of process 0, whose name JobSet's headless service resolves."""
        return f"{self.name}-{REPLICATED_JOB}-0-0.{self.name}:{COORDINATOR_PORT}"

    @property
    def grace_s(self) -> float:
        """The setting ``preemption_grace_s``: what a save may take after its sync point."""
        if self.preemption_grace_s is not None:
            return self.preemption_grace_s
        return SPOT_GRACE_S if self.spot else GRACE_S

    @property
    def grace_period_s(self) -> int:
        """Seconds from SIGTERM to SIGKILL of a trainer: the notice, the sync point, the save."""
        return math.ceil(self.grace_s) + GRACE_MARGIN_S

    @property
    def node_labels(self) -> dict[str, str]:
        """Labels of the nodes of a slice."""
        found = {
            "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[self.tpu_type],
            "cloud.google.com/gke-tpu-topology": self.topology,
            # A topology may be had of several machine types: 2x4 is two hosts, or one.
            "node.kubernetes.io/instance-type": self._machine,
        }
        if self.spot:
            found[_SPOT] = "true"
        if self.reservation is not None:
            found["cloud.google.com/reservation-name"] = self.reservation
        return found | dict(self.node_selector)

    @property
    def chips_per_host(self) -> int:
        """TPU chips of a host."""
        return MACHINES[self._machine].chips

    @property
    def devices_per_host(self) -> int:
        """JAX devices of a host."""
        return self.chips_per_host * devices_per_chip(self.tpu_type)

    @property
    def _machine(self) -> str:
        return self.machine_type or machines_of(self.tpu_type)[0]

    def labels(self, component: str) -> dict[str, str]:
        """Return the labels of what belongs to this job, by which policies select pods."""
        return {"app.kubernetes.io/instance": self.name, "app.kubernetes.io/component": component}


def tolerations_of(job: GkeJob) -> list[dict[str, str]]:
    """Return the tolerations of the job's pods."""
    taints: list[tuple[str, str | None, Effect]] = [("google.com/tpu", None, "NoSchedule")]
    if job.spot:
        taints.append((_SPOT, "true", "NoSchedule"))
    return [
        {"key": key, "operator": "Exists", "effect": effect}
        if value is None
        else {"key": key, "operator": "Equal", "value": value, "effect": effect}
        for key, value, effect in (*taints, *job.tolerations)
    ]


def held_on_host(job: GkeJob) -> int:
    """Return the bytes of a host's slots and host states. ConfigError: the placement is none."""
    share = stored_share(parse_placement(job.placement), job.slices)
    slots = SLOTS - 1 + job.keep_steps  # one is written while those that are kept stay whole
    slot = math.ceil(job.state_bytes / job.hosts * share)
    return math.ceil(held_bytes(slot, job.host_state_bytes, job.slices - 1, slots))


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
    if job.queue is not None and not _SUBDOMAIN.fullmatch(job.queue):
        problems.append(f"--queue {job.queue!r} is not a name of a queue")
    if not job.secret_name:
        problems.append(
            "no secret: give --secret NAME of a Kubernetes Secret that has the run's secret under"
            " the key 'secret' (kubectl create secret generic NAME --from-file=secret=FILE)"
        )
    elif not _SUBDOMAIN.fullmatch(job.secret_name):
        problems.append(f"--secret {job.secret_name!r} is not a name of a Secret")
    if NAME_PATTERN.fullmatch(job.run_name) is None:
        problems.append(f"--run-id {job.run_name!r} must match {NAME_PATTERN.pattern}")
    return problems


def _node_problems(job: GkeJob) -> list[str]:
    problems: list[str] = []
    if job.spot and job.reservation is not None:
        problems.append("--spot and --reservation exclude each other")
    for option, text in (
        ("--reservation", job.reservation),
        *(("--node-pools", pool) for pool in job.node_pools),
    ):
        if text is not None and (not text or not _LABEL_VALUE.fullmatch(text)):
            problems.append(f"{option} {text!r} is not a name of one")
    labels = [("--node-selector", key, value) for key, value in job.node_selector]
    labels += [("--toleration", key, value or "") for key, value, _ in job.tolerations]
    problems += [
        f"{option} {key}={value} is no label of Kubernetes"
        for option, key, value in labels
        if not (_LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value))
    ]
    if not _LABEL.fullmatch(job.prometheus_namespace):
        name = job.prometheus_namespace
        problems.append(f"--prometheus-namespace {name!r} is not a name of a namespace")
    return problems


def _program_problems(job: GkeJob) -> list[str]:
    problems: list[str] = []
    if not job.command:
        problems.append("no program was given: write it after --")
    if not job.image or any(character.isspace() for character in job.image):
        problems.append(f"--image {job.image!r} is not a name of an image")
    if not re.fullmatch(r"[^\s@]+@sha256:[0-9a-f]{64}", job.mount_image):
        problems.append(f"--mount-image {job.mount_image!r} must end with @sha256: and its digest")
    if not re.fullmatch(r"gs://[a-z0-9][-a-z0-9_.]*(/[^\\*?\[\]\s]+)", job.directory):
        problems.append(f"--dir {job.directory!r} must be a directory in a bucket: gs://bucket/run")
    if job.ramdisk_source not in get_args(RamdiskSource):
        problems.append(f"--ramdisk-source must be one of {', '.join(get_args(RamdiskSource))}")
    if (job.ramdisk_source == "in-place") != bool(job.restart_agent_image):
        problems.append(
            "--restart-agent-image and --ramdisk-source in-place need each other: JobSet's"
            " InPlaceRestart works through its agent in each pod"
        )
    return problems


def _size_problems(job: GkeJob) -> list[str]:
    problems = [
        f"{option} must be {least} to {most}, not {value}"
        for option, value, least, most in (
            ("--slices", job.slices, 1, 999),
            ("--hosts", job.hosts, 1, 9999),
            ("--max-restarts", job.max_restarts, 0, 1_000_000),
            ("--keep-steps", job.keep_steps, 1, 64),
        )
        if not least <= value <= most
    ]
    problems += [
        f"{option} must be above 0 and at most a day, not {seconds}"
        for option, seconds in (
            ("--preemption-grace-s", job.grace_s),
            ("--hang-timeout-s", job.hang_timeout_s),
            ("--drain-s", job.drain_s),
        )
        if not 0 < seconds <= _DAY_S
    ]
    if problems:
        return problems
    try:
        needed_bytes = held_on_host(job)
    except ConfigError as error:
        return [*error.problems]
    log_text = ""
    if job.ramdisk_source != "daemonset":
        needed_bytes += LOG_BYTES
        log_text = f", and {format_quantity(LOG_BYTES)} of event log"
    if job.ramdisk_bytes < needed_bytes:
        problems.append(
            f"--ramdisk {format_quantity(job.ramdisk_bytes)} is smaller than the saves need:"
            f" {format_quantity(needed_bytes)} on each host, for {job.keep_steps + 1} slots"
            f" of its part of {format_quantity(job.state_bytes)} with {job.placement}, each with"
            f" {job.slices} host states of {format_quantity(job.host_state_bytes)}{log_text}"
        )
    if job.memory_bytes is not None and job.memory_bytes <= job.ramdisk_bytes:
        problems.append(
            f"--memory {format_quantity(job.memory_bytes)} must be more than --ramdisk"
            f" {format_quantity(job.ramdisk_bytes)}: what a pod writes there counts as its memory"
        )
    return problems
