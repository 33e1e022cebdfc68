"""``eckpt deploy gke``: the manifests of a job on GKE."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import get_args

from emergency_ckpt.config import Config
from emergency_ckpt.core.placement.placement_policies import ALL_BUT_PRIMARY
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.run_secret import load_secret_file
from emergency_ckpt.tools.deploy.gke_job import GkeJob, RamdiskSource
from emergency_ckpt.tools.deploy.manifests import as_yaml, manifests
from emergency_ckpt.tools.deploy.quantity import parse_quantity
from emergency_ckpt.tools.deploy.tpus import ACCELERATORS

_SECRET_NAME = "{name}-secret"  # noqa: S105  the name of an object


EXAMPLE = (
    "eckpt deploy gke --name run7 --image IMAGE --dir gs://bucket/run7 --slices 4 --hosts 16"
    " --tpu-type v5p --topology 4x4x4 --state 700Gi --ramdisk 200Gi -- python train.py"
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
    gke.add_argument("--name", required=True, help="of the JobSet, and of what belongs to it")
    gke.add_argument("--namespace", default="default", help="of all objects")
    gke.add_argument("--image", required=True, help="image of the trainer: see deploy/Dockerfile")
    gke.add_argument("--dir", required=True, help="persistent directory, gs://bucket/run")
    gke.add_argument("--run-id", help="name of the run; default: --name")
    gke.add_argument("--slices", type=int, required=True, help="data-parallel replicas")
    gke.add_argument("--hosts", type=int, required=True, help="hosts of each slice")
    gke.add_argument("--tpu-type", required=True, help=", ".join(ACCELERATORS))
    gke.add_argument("--topology", required=True, help="of a slice, such as 4x4x4")
    gke.add_argument(
        "--state", type=_quantity, required=True, help="one replica of the state, such as 700Gi"
    )
    gke.add_argument(
        "--host-state",
        type=_quantity,
        default=GkeJob.host_state_bytes,
        help="host state of one process, such as 5Mi",
    )
    gke.add_argument("--ramdisk", type=_quantity, required=True, help="of a host, such as 200Gi")
    gke.add_argument("--memory", type=_quantity, help="memory limit of a pod, ramdisk included")
    gke.add_argument(
        "--ramdisk-source",
        choices=get_args(RamdiskSource),
        default="daemonset",
        help="a tmpfs that a DaemonSet mounts on the nodes; the pods' own memory, kept by restarts"
        " in place; or the volume of GKE's multi-tier checkpoint driver",
    )
    gke.add_argument("--restart-agent-image", help="JobSet's agent, for restarts in place")
    gke.add_argument("--secret", default="", metavar="NAME", help="Kubernetes Secret of the run")
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
    gke.add_argument("--keep-steps", type=int, default=1, help="setting local_keep_last_n")
    gke.add_argument("--placement", default=ALL_BUT_PRIMARY, help="setting placement")
    gke.add_argument(
        "--preemption-grace-s",
        type=float,
        default=Config.preemption_grace_s,
        help="setting preemption_grace_s",
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


def run(args: argparse.Namespace) -> int:
    """Print the manifests; return 0."""
    made_by = f"Made by: eckpt {shlex.join(args.words)}"
    print(as_yaml(manifests(_job(args)), [made_by]), end="")
    return 0


def _job(args: argparse.Namespace) -> GkeJob:
    secret = None if args.secret_file is None else load_secret_file(args.secret_file)
    name = args.secret or (_SECRET_NAME.format(name=args.name) if secret else "")
    if secret is not None and not secret.isascii():
        raise ConfigError(["a Secret's text must be ASCII; use token_hex"], target="secret file")
    return GkeJob(
        name=args.name,
        namespace=args.namespace,
        image=args.image,
        command=tuple(args.program),
        directory=args.dir,
        run_id=args.run_id,
        slices=args.slices,
        hosts=args.hosts,
        tpu_type=args.tpu_type,
        topology=args.topology,
        state_bytes=args.state,
        host_state_bytes=args.host_state,
        ramdisk_bytes=args.ramdisk,
        memory_bytes=args.memory,
        ramdisk_source=args.ramdisk_source,
        restart_agent_image=args.restart_agent_image,
        compilation_cache=args.compilation_cache,
        secret_name=name,
        secret=secret,
        queue=args.queue,
        max_restarts=args.max_restarts,
        keep_steps=args.keep_steps,
        placement=args.placement,
        preemption_grace_s=args.preemption_grace_s,
        hang_timeout_s=args.hang_timeout_s,
        drain_s=args.drain_s,
    )


def _quantity(text: str) -> int:
    try:
        return parse_quantity(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.problems[0]) from error
