"""``eckpt plan``: cost and survival of each number of copies; with ``--gke`` manifests."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from emergency_ckpt.core.placement import ALL_BUT_PRIMARY
from emergency_ckpt.core.wording import count_text
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.tools.cli.arguments import add_gib, add_host_state, add_json, print_json
from emergency_ckpt.tools.cli.output import print_line, print_table
from emergency_ckpt.tools.deploy import ACCELERATORS, as_yaml, filled
from emergency_ckpt.tools.placement_study import (
    GIB,
    JobShape,
    PlacementCosts,
    recommend,
    study,
)

_LEGEND = (
    "RAM: the slots of a host (--local-keep-last-n and one more), with host states. Plan one slot",
    "more for hosts that write to storage: without it they copy.",
    "save: from the devices of a host to its RAM. fetch: from peers in a restore, nothing lost.",
    "k lost: the RAM tier survives k random hosts failing at once.",
)
_TARGET = "the plan"
EXAMPLE = "eckpt plan --slices 4 --hosts 64 --state-gib 64"
_GKE_EXAMPLE = r"""
with --gke:
  eckpt plan --gke deploy/gke/daemonset.yaml --name run7 --image IMAGE --dir gs://bucket/run7 \
    --secret run7-secret --slices 4 --hosts 16 --tpu-type v5p --topology 4x4x4 --state-gib 700 \
    --ramdisk-gib 200 -- python /app/train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    parser.description = (
        "Computes, for each placement of shards on slices: RAM, the bytes of a save and of a"
        " restore, and the probability that the RAM tier survives the loss of random hosts; and"
        " recommends one. With --gke it fills a template of manifests instead, and names what is"
        " wrong with the job and the template, all at once."
    )
    parser.usage = "eckpt plan [options] [--gke TEMPLATE [options] -- PROGRAM [ARGUMENT ...]]"
    parser.epilog = _GKE_EXAMPLE
    parser.add_argument("--slices", type=int, required=True, help="data-parallel replicas")
    parser.add_argument("--hosts", type=int, required=True, help="hosts of each slice")
    add_gib(parser, "--state-gib", "one replica of the state", required=True)
    add_host_state(parser, "host state of one host")
    add_gib(parser, "--ramdisk-gib", "ramdisk of a host; default: any")
    parser.add_argument("--lost-hosts", type=int, default=4, help="hosts that fail together")
    parser.add_argument(
        "--survival",
        type=float,
        default=0.99,
        help="wanted probability that RAM survives that",
    )
    parser.add_argument("--local-keep-last-n", type=int, default=1, help="as the setting")
    add_json(parser)
    _add_gke(parser.add_argument_group("manifests of a job on GKE"))


def _add_gke(gke: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add an option for what a template of ``deploy/gke`` leaves open."""
    gke.add_argument(
        "--gke",
        type=Path,
        metavar="TEMPLATE",
        help="fill this template of deploy/gke, and print the manifests; nothing is applied",
    )
    gke.add_argument("--name", default="", help="of the JobSet, and of what belongs to it")
    gke.add_argument("--namespace", default="default", help="of all objects")
    gke.add_argument("--image", default="", help="of the trainer: see deploy/Dockerfile")
    gke.add_argument("--dir", default="", help="persistent directory, gs://bucket/run")
    gke.add_argument("--run-id", help="name of the run; default: --name")
    gke.add_argument("--secret", default="", metavar="NAME", help="Kubernetes Secret of the run")
    gke.add_argument("--tpu-type", default="", help=", ".join(ACCELERATORS))
    gke.add_argument("--topology", default="", help="of a slice, such as 4x4x4")
    gke.add_argument(
        "--machine-type",
        help="such as ct6e-standard-8t, a host of 8 chips (default: the type's host of 4)",
    )
    add_gib(gke, "--memory-gib", "memory limit of a pod, ramdisk included")
    gke.add_argument("--placement", help=f"as the setting (default: {ALL_BUT_PRIMARY})")
    gke.add_argument("--restart-agent-image", help="JobSet's agent, for restarts in place")


def run(args: argparse.Namespace) -> int:
    """Compute and print the table, or fill a template; return 0."""
    if args.gke is not None:
        return _print_manifests(args)
    problems = [
        f"{what} needs --gke"
        for what, is_given in (
            ("a program after --", bool(args.program)),
            ("--placement", args.placement is not None),
        )
        if is_given
    ]
    if problems:
        raise ConfigError(problems, target=_TARGET)
    if not 0 < args.survival <= 1:
        raise ConfigError(
            [f"--survival must be above 0 and at most 1, not {args.survival}"], target=_TARGET
        )
    job = JobShape(
        slices=args.slices,
        hosts_per_slice=args.hosts,
        state_bytes=args.state_bytes,
        ramdisk_bytes=args.ramdisk_bytes,
        most_lost_hosts=args.lost_hosts,
        host_state_bytes=args.host_state_bytes,
        local_keep_last_n=args.local_keep_last_n,
    )
    rows = study(job)
    chosen, reason = recommend(job, rows, wanted_survival=args.survival)
    if args.json:
        answer = {"job": job, "placements": rows, "recommended": chosen.name, "reason": reason}
        print_json(answer)
        return 0
    _print_costs(job, rows, chosen)
    for line in (f"Recommended: {chosen.name} ({reason}).", *_LEGEND):
        print_line(line)
    return 0


def _print_manifests(args: argparse.Namespace) -> int:
    problems = ["--gke needs --ramdisk-gib"] if args.ramdisk_bytes is None else []
    problems += ["--gke prints YAML, no JSON"] if args.json else []
    if problems:
        raise ConfigError(problems, target=_TARGET)
    args.placement = args.placement or ALL_BUT_PRIMARY
    try:
        text = args.gke.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"{args.gke.name} is no UTF-8: {error}"], target="the template"
        ) from error
    manifests = filled(text, args, args.gke.name)
    sys.stdout.write(as_yaml(manifests, [f"Filled by: eckpt {shlex.join(args.words)}"]))
    return 0


def _print_costs(job: JobShape, rows: Sequence[PlacementCosts], chosen: PlacementCosts) -> None:
    slices = count_text(job.slices, "slice", "slices")
    hosts = count_text(job.hosts_per_slice, "host", "hosts")
    print_line(f"{slices} of {hosts}, {job.host_bytes / GIB:.4g} GiB of state a host")
    most_bytes = math.inf if job.ramdisk_bytes is None else job.ramdisk_bytes
    costs = ("RAM GiB", "save GiB", "fetch GiB")
    losses = (f"{lost} lost" for lost in range(1, len(rows[0].survival) + 1))
    print_table(
        ["placement", *costs, *losses],
        [
            [
                row.name + (" *" if row is chosen else ""),
                ("too much: " if row.ram_bytes > most_bytes else "") + f"{row.ram_bytes / GIB:.2f}",
                f"{row.stored_bytes / GIB:.2f}",
                f"{row.fetch_bytes / GIB:.2f}",
                *map(_percent, row.survival),
            ]
            for row in rows
        ],
    )


def _percent(probability: float) -> str:
    """Return a percentage that is never rounded up to 100%."""
    if probability == 1:
        return "100%"
    return (
        f"{min(100 * probability, 99.9999):.6g}%" if probability > 0.999 else f"{probability:.2%}"
    )
