"""``eckpt deploy gke``: the manifests of a job on GKE."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

from emergency_ckpt.core.placement.placement_policies import ALL_BUT_PRIMARY
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.run_secret import load_secret_file
from emergency_ckpt.tools.cli.arguments import addresses
from emergency_ckpt.tools.deploy.gke_job import (
    GRACE_S,
    MOUNT_IMAGE,
    SPOT_GRACE_S,
    Effect,
    GkeJob,
    RamdiskSource,
    TpuRights,
)
from emergency_ckpt.tools.deploy.manifests import as_yaml, manifests
from emergency_ckpt.tools.deploy.quantity import parse_quantity
from emergency_ckpt.tools.deploy.tpus import ACCELERATORS

EXAMPLE = (
    "eckpt deploy gke --name run7 --image IMAGE --dir gs://bucket/run7 --slices 4 --hosts 16"
    " --tpu-type v5p --topology 4x4x4 --state 700Gi --ramdisk 200Gi --secret run7-secret"
    " -- python train.py"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``deploy``."""
    parser.description = "Writes the manifests of a job for an engine; nothing is applied."
    engines = parser.add_subparsers(title="engines", metavar="ENGINE", required=True)
    gke = engines.add_parser(
        "gke",
        help="JobSet on GKE",
        formatter_class=parser.formatter_class,
        epilog=f"example:\n  {EXAMPLE}",
        usage="eckpt deploy gke [options] -- PROGRAM [ARGUMENT ...]",
        description=(
            "Writes a JobSet and what it needs as YAML, to be read and given to kubectl apply."
            " Faults are named here, all at once: a ramdisk smaller than the state's slots, hosts"
            " that are not those of the topology, a missing secret. See deploy/gke/README.md."
        ),
    )
    _add_options(gke)


def _add_options(gke: argparse.ArgumentParser) -> None:
    """Add an option for each field of ``GkeJob``, under its name or with it as ``dest``."""
    gke.add_argument("--name", required=True, help="of the JobSet, and of what belongs to it")
    gke.add_argument("--namespace", default="default", help="of all objects")
    gke.add_argument("--image", required=True, help="image of the trainer: see deploy/Dockerfile")
    gke.add_argument(
        "--dir", dest="directory", required=True, help="persistent directory, gs://bucket/run"
    )
    gke.add_argument("--run-id", help="name of the run; default: --name")
    gke.add_argument("--restart-agent-image", help="JobSet's agent, for restarts in place")
    gke.add_argument(
        "--mount-image",
        default=MOUNT_IMAGE,
        metavar="IMAGE@sha256:...",
        help="image with a shell and mount, for the DaemonSet's privileged container (default: the"
        " base of deploy/Dockerfile)",
    )
    gke.add_argument(
        "--secret",
        dest="secret_name",
        default="",
        metavar="NAME",
        help="Kubernetes Secret of the run",
    )
    gke.add_argument(
        "--secret-file", type=Path, help="write that Secret too, with the bytes of this file"
    )
    gke.add_argument(
        "--compilation-cache",
        default=GkeJob.compilation_cache,
        metavar="URL",
        help="JAX's compilation cache. The default is the pod's own and goes with it. In a bucket"
        " all pods share it, and whoever can write there runs code in the trainers",
    )
    gke.add_argument("--queue", help="Kueue's queue")
    gke.add_argument("--max-restarts", type=int, default=10, help="of the JobSet")
    gke.add_argument(
        "--preemption-grace-s",
        type=float,
        help=f"setting preemption_grace_s (default: {GRACE_S:g}; with --spot {SPOT_GRACE_S:g}, as"
        " such nodes give a pod 15 s from SIGTERM on)",
    )
    gke.add_argument(
        "--hang-timeout-s",
        type=float,
        default=GkeJob.hang_timeout_s,
        help="setting hang_timeout_s",
    )
    gke.add_argument(
        "--drain-s",
        type=float,
        default=GkeJob.drain_s,
        help="with the DaemonSet: RAM is drained to --dir when no process was there for so long; in"
        " place: longest time for that when the pods end",
    )
    gke.add_argument(
        "--prometheus-namespace",
        default=GkeJob.prometheus_namespace,
        metavar="NAMESPACE",
        help="whose pods may read the trainers' metrics. The default is Google's Prometheus, for"
        " which a PodMonitoring is written",
    )
    _add_sizes(gke.add_argument_group("RAM"))
    _add_nodes(gke.add_argument_group("nodes"))


def _add_sizes(sizes: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    sizes.add_argument(
        "--state",
        dest="state_bytes",
        type=_quantity,
        required=True,
        help="one replica of the state, such as 700Gi",
    )
    sizes.add_argument(
        "--host-state",
        dest="host_state_bytes",
        type=_quantity,
        default=GkeJob.host_state_bytes,
        help="host state of one process, such as 5Mi",
    )
    sizes.add_argument(
        "--ramdisk",
        dest="ramdisk_bytes",
        type=_quantity,
        required=True,
        help="of a host, such as 200Gi",
    )
    sizes.add_argument(
        "--memory",
        dest="memory_bytes",
        type=_quantity,
        help="memory limit of a pod, ramdisk included",
    )
    sizes.add_argument(
        "--ramdisk-source",
        choices=get_args(RamdiskSource),
        default="daemonset",
        help="a tmpfs that a DaemonSet mounts on the nodes; the pods' own memory, kept by restarts"
        " in place; or the volume of GKE's multi-tier checkpoint driver",
    )
    sizes.add_argument("--keep-steps", type=int, default=1, help="setting local_keep_last_n")
    sizes.add_argument("--placement", default=ALL_BUT_PRIMARY, help="setting placement")


def _add_nodes(nodes: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    nodes.add_argument("--slices", type=int, required=True, help="data-parallel replicas")
    nodes.add_argument("--hosts", type=int, required=True, help="hosts of each slice")
    nodes.add_argument("--tpu-type", required=True, help=", ".join(ACCELERATORS))
    nodes.add_argument("--topology", required=True, help="of a slice, such as 4x4x4")
    nodes.add_argument(
        "--machine-type",
        help="such as ct6e-standard-8t, a host of 8 chips (default: the type's host of 4)",
    )
    nodes.add_argument("--spot", action="store_true", help="spot nodes")
    nodes.add_argument("--reservation", metavar="NAME", help="nodes of a reservation")
    nodes.add_argument(
        "--node-pools",
        type=addresses,
        default=(),
        metavar="POOL,...",
        help="the job's, one for each slice of several hosts; without it all nodes of this kind"
        " get the DaemonSet",
    )
    nodes.add_argument(
        "--node-selector",
        type=_label,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further label of the nodes; may be repeated",
    )
    nodes.add_argument(
        "--toleration",
        dest="tolerations",
        type=_taint,
        action="append",
        default=[],
        metavar="KEY[=VALUE]:EFFECT",
        help="a further taint of the nodes; may be repeated",
    )
    nodes.add_argument(
        "--host-network",
        action="store_true",
        help="trainers use the node's network, where no network policy holds",
    )
    nodes.add_argument(
        "--tpu-rights",
        choices=get_args(TpuRights),
        default=GkeJob.tpu_rights,
        help="of the trainer's container, to reach its TPU. locked-memory: it starts as root with"
        " three capabilities, raises that limit and goes on as user 1000 with none; none: for sites"
        " that forbid this, on GKE 1.28 and newer, whose nodes raise it; privileged: before 1.27.4",
    )


def run(args: argparse.Namespace) -> int:
    """Print the manifests; return 0."""
    made_by = f"Made by: eckpt {shlex.join(args.words)}"
    sys.stdout.write(as_yaml(manifests(_job(args)), [made_by]))
    return 0


def _job(args: argparse.Namespace) -> GkeJob:
    secret = None if args.secret_file is None else load_secret_file(args.secret_file)
    if secret is not None and not secret.isascii():
        raise ConfigError(["a Secret's text must be ASCII; use token_hex"], target="secret file")
    options = vars(args)
    given = {each.name: options[each.name] for each in fields(GkeJob) if each.name in options}
    given |= {
        "command": tuple(args.program),
        "secret": secret,
        "secret_name": args.secret_name or (f"{args.name}-secret" if secret else ""),
        "node_selector": tuple(args.node_selector),
        "tolerations": tuple(args.tolerations),
    }
    return GkeJob(**given)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _taint(text: str) -> tuple[str, str | None, str]:
    label, _, effect = text.rpartition(":")
    key, equals, value = label.partition("=")
    if not label or effect not in get_args(Effect):
        effects = ", ".join(get_args(Effect))
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY[=VALUE]:EFFECT, of {effects}")
    return key, value if equals else None, effect


def _quantity(text: str) -> int:
    try:
        return parse_quantity(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.problems[0]) from error
