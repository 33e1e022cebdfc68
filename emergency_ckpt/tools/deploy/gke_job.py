"""The description of a job on GKE: the values of a template's placeholders, and their faults.

Also the TPU slices of GKE: machine types, and the hosts of a topology.
"""

from __future__ import annotations

import argparse
import math
import re

from emergency_ckpt.core.limits import NAME_PATTERN, SMALL_FILES_BYTES
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extensions import parse_placement
from emergency_ckpt.tools.placement_study import GIB, SLOTS, held_bytes, mib_bytes, stored_share

ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""Value of the node label ``cloud.google.com/gke-tpu-accelerator`` for each type."""

MACHINES = {
    "v4": {"ct4p-hightpu-4t": 4},
    "v5e": {"ct5lp-hightpu-4t": 4, "ct5lp-hightpu-1t": 1, "ct5lp-hightpu-8t": 8},
    "v5p": {"ct5p-hightpu-4t": 4},
    "v6e": {"ct6e-standard-4t": 4, "ct6e-standard-1t": 1, "ct6e-standard-8t": 8},
    "tpu7x": {"tpu7x-standard-4t": 4},
}
"""Chips of a host by machine type, for each TPU type; the first one is the default. A machine of 1
or 8 chips is a slice by itself."""

_CHIPS_OF_A_SHARED_SLICE = 4
_FLAT = ("v5e", "v6e")
"""The types whose topologies have two dimensions; those of the others have three."""
_TOPOLOGY = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}", re.ASCII)

_NAME_SUFFIX_CHARS = len("-slice-999-9999-abcde")
_LABEL_LIMIT_CHARS = 63
_NODE_POOL = "cloud.google.com/gke-nodepool"
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def job_problems(args: argparse.Namespace, besides_bytes: int) -> list[str]:
    """Return every fault of the options of ``eckpt plan --gke``, one line each.

    ``besides_bytes``: what else lies in a host's ramdisk.
    """
    return [
        *_name_problems(args),
        *tpu_problems(args.tpu_type, args.machine_type, args.topology, args.hosts),
        *_size_problems(args, besides_bytes),
    ]


def job_values(args: argparse.Namespace) -> dict[str, str | list[str] | None]:
    """Return the values of the placeholders; None for what this job does not have.

    For a job without faults.
    """
    machines = MACHINES[args.tpu_type]
    machine = args.machine_type or next(iter(machines))
    chips = machines[machine]
    memory = None if args.memory_gib is None else format_quantity(round(args.memory_gib * GIB))
    ramdisk_bytes = round(args.ramdisk_gib * GIB)
    return {
        "NAME": args.name,
        "NAMESPACE": args.namespace,
        "IMAGE": args.image,
        "PROGRAM": list(args.program),
        "DIR": args.dir,
        "BUCKET": args.dir.removeprefix("gs://").partition("/")[0],
        "RUN_ID": args.run_id or args.name,
        "SECRET": args.secret,
        "SLICES": str(args.slices),
        "HOSTS": str(args.hosts),
        "PROCESSES": str(args.slices * args.hosts),
        "ACCELERATOR": ACCELERATORS[args.tpu_type],
        "TOPOLOGY": args.topology,
        # A topology may be had of several machine types: 2x4 is two hosts, or one.
        "MACHINE": machine,
        "CHIPS": str(chips),
        "DEVICES": str(chips * devices_per_chip(args.tpu_type)),
        # One slice is one node pool, and no other slice's pods go there. Slices of one host share
        # a pool: each takes all chips of its node.
        "POOL_LABEL": _NODE_POOL if args.hosts > 1 else None,
        "STATE_GIB": f"{args.state_gib:.6g}",
        "HOST_STATE_MIB": f"{args.host_state_mib:.6g}",
        "RAMDISK": format_quantity(ramdisk_bytes),
        "RAMDISK_BYTES": str(ramdisk_bytes),
        "MEMORY": memory,
        "PLACEMENT": args.placement,
        "KEEP_STEPS": str(args.local_keep_last_n),
        "RESTART_AGENT_IMAGE": args.restart_agent_image,
    }


def format_quantity(size_bytes: int) -> str:
    """Return a size as Kubernetes writes it: the shortest with a binary unit that is exact."""
    for power, prefix in reversed(tuple(enumerate("KMGTP", start=1))):
        if size_bytes % (1 << (10 * power)) == 0:
            return f"{size_bytes >> (10 * power)}{prefix}i"
    return str(size_bytes)


def _name_problems(args: argparse.Namespace) -> list[str]:
    problems: list[str] = []
    longest = _LABEL_LIMIT_CHARS - _NAME_SUFFIX_CHARS
    if not _LABEL.fullmatch(args.name) or len(args.name) > longest:
        problems.append(
            f"--name {args.name!r} must be 1 to {longest} of a-z, 0-9 and -, and begin with a"
            " letter, because pods and their host names are called after it"
        )
    if not _LABEL.fullmatch(args.namespace) or len(args.namespace) > _LABEL_LIMIT_CHARS:
        problems.append(f"--namespace {args.namespace!r} is not a name of a namespace")
    if not args.secret:
        problems.append(
            "no secret: give --secret NAME of a Kubernetes Secret that has the run's secret under"
            " the key 'secret' (kubectl create secret generic NAME --from-file=secret=FILE)"
        )
    elif not _SUBDOMAIN.fullmatch(args.secret):
        problems.append(f"--secret {args.secret!r} is not a name of a Secret")
    if NAME_PATTERN.fullmatch(args.run_id or args.name) is None:
        problems.append(f"--run-id {args.run_id or args.name!r} must match {NAME_PATTERN.pattern}")
    if not args.program:
        problems.append("no program was given: write it after --")
    for option, image in (
        ("--image", args.image),
        ("--restart-agent-image", args.restart_agent_image or "-"),
    ):
        if not image or any(character.isspace() for character in image):
            problems.append(f"{option} {image!r} is not a name of an image")
    if not re.fullmatch(r"gs://[a-z0-9][-a-z0-9_.]*(/[^\\*?\[\]\s]+)", args.dir):
        problems.append(f"--dir {args.dir!r} must be a directory in a bucket: gs://bucket/run")
    return problems


def _size_problems(args: argparse.Namespace, besides_bytes: int) -> list[str]:
    problems = [
        f"{option} must be {least} to {most}, not {value}"
        for option, value, least, most in (
            ("--slices", args.slices, 1, 999),
            ("--hosts", args.hosts, 1, 9999),
            ("--local-keep-last-n", args.local_keep_last_n, 1, 64),
        )
        if not least <= value <= most
    ]
    if problems:
        return problems
    try:
        share = stored_share(parse_placement(args.placement), args.slices)
    except ConfigError as error:
        return [*error.problems]
    slots = (
        SLOTS - 1 + args.local_keep_last_n
    )  # one is written while those that are kept stay whole
    state_bytes, ramdisk_bytes = round(args.state_gib * GIB), round(args.ramdisk_gib * GIB)
    host_bytes = mib_bytes("--host-state-mib", args.host_state_mib, "the job on GKE")
    slot = math.ceil(state_bytes / args.hosts * share)
    needed_bytes = math.ceil(held_bytes(slot, host_bytes, args.slices - 1, slots))
    needed_bytes += SMALL_FILES_BYTES + besides_bytes
    log_text = f", and {format_quantity(besides_bytes)} of event log" if besides_bytes else ""
    if ramdisk_bytes < needed_bytes:
        problems.append(
            f"a ramdisk of {format_quantity(ramdisk_bytes)} is smaller than the saves need:"
            f" {format_quantity(needed_bytes)} on each host, for {args.local_keep_last_n + 1} slots"
            f" of its part of {format_quantity(state_bytes)} with {args.placement}, each with"
            f" {args.slices} host states of {format_quantity(host_bytes)}{log_text}"
        )
    if args.memory_gib is not None and args.memory_gib <= args.ramdisk_gib:
        limit = format_quantity(round(args.memory_gib * GIB))
        problems.append(
            f"a memory limit of {limit} must be more than the ramdisk,"
            f" {format_quantity(ramdisk_bytes)}: what a pod writes there counts as its memory"
        )
    return problems


def devices_per_chip(tpu_type: str) -> int:
    """Return the JAX devices of a chip: tpu7x shows each of its two cores as one."""
    return 2 if tpu_type == "tpu7x" else 1


def tpu_problems(tpu_type: str, machine_type: str | None, topology: str, hosts: int) -> list[str]:
    """Return the fault of a slice of ``hosts`` hosts; empty without one.

    A topology of the right number of dimensions may be one that nobody sells: the plan has no list
    of those that are sold, and the pods of such a slice wait for nodes.

    Args:
      machine_type: None for the default one of ``tpu_type``.
    """
    machines = MACHINES.get(tpu_type)
    if machines is None:
        return [f"--tpu-type must be one of {', '.join(MACHINES)}, not {tpu_type!r}"]
    name = machine_type or next(iter(machines))
    if name not in machines:
        return [
            f"--machine-type {name!r} is no machine with {tpu_type} chips: {', '.join(machines)}"
        ]
    example = "2x4" if tpu_type in _FLAT else "2x2x4"
    if not _TOPOLOGY.fullmatch(topology) or topology.count("x") != example.count("x"):
        return [f"--topology {topology!r} is no topology of {tpu_type}, such as {example}"]
    chips, chips_of_host = math.prod(map(int, topology.split("x"))), machines[name]
    is_alone = chips_of_host != _CHIPS_OF_A_SHARED_SLICE
    if chips % chips_of_host or (is_alone and chips != chips_of_host):
        alone = ", which are a slice by themselves" if is_alone else ""
        return [f"--topology {topology} has {chips} chips, and {name} has {chips_of_host}{alone}"]
    there = chips // chips_of_host
    if hosts == there:
        return []
    than = "more" if hosts > there else "fewer"
    return [
        f"--hosts {hosts} is {than} than the topology has: {topology} of {tpu_type} has {there}"
        f" hosts of {chips_of_host} chips, and each of them runs one process"
    ]
