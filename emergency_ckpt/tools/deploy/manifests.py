"""All manifests of a job, and their text."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from emergency_ckpt.core.wording import printable
from emergency_ckpt.tools.deploy.access import (
    metadata_of,
    network_policies,
    restart_agent_access,
    secret,
    service_account,
)
from emergency_ckpt.tools.deploy.gke_job import GOOGLE_PROMETHEUS, GkeJob, tolerations_of
from emergency_ckpt.tools.deploy.jobset import jobset
from emergency_ckpt.tools.deploy.quantity import format_quantity
from emergency_ckpt.tools.deploy.ramdisk_daemon import ramdisk_daemon
from emergency_ckpt.tools.deploy.trainer_pod import Manifest

_WIDTH_CHARS = 110


def manifests(job: GkeJob) -> list[Manifest]:
    """Return the objects of ``job`` in the order in which they are to be made."""
    objects = [service_account(job), *secret(job), *network_policies(job)]
    if job.prometheus_namespace == GOOGLE_PROMETHEUS:
        objects.append(_pod_monitoring(job))
    match job.ramdisk_source:
        case "daemonset":
            objects += ramdisk_daemon(job)
        case "in-place":
            objects += restart_agent_access(job)
        case "gke-driver":
            objects.append(_checkpoint_configuration(job))
    return [*objects, jobset(job)]


def as_yaml(objects: Sequence[Manifest], comments: Sequence[str] = ()) -> str:
    """Return the objects as one YAML stream below ``comments``, one line each.

    A comment may quote a program's arguments. A newline in one would end the comment, and what
    follows would be manifests.
    """
    head = "".join(f"# {printable(line)}\n" for line in comments)
    return head + "".join(
        "---\n" + yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=_WIDTH_CHARS)
        for each in objects
    )


def _pod_monitoring(job: GkeJob) -> Manifest:
    """Return what has Google's collectors read the metrics of each trainer."""
    return {
        "apiVersion": "monitoring.googleapis.com/v1",
        "kind": "PodMonitoring",
        "metadata": metadata_of(job),
        "spec": {
            "selector": {"matchLabels": job.labels("trainer")},
            "endpoints": [{"port": "metrics", "interval": "15s"}],
        },
    }


def _checkpoint_configuration(job: GkeJob) -> Manifest:
    """Return the configuration of GKE's driver, which is one for a cluster.

    The bucket is where that driver's own backups would go; what this job writes into the volume is
    in no format that it backs up.
    """
    return {
        "apiVersion": "checkpointing.gke.io/v1",
        "kind": "CheckpointConfiguration",
        "metadata": {"name": job.name},
        "spec": {
            "cloudStorageBucketName": job.directory.removeprefix("gs://").partition("/")[0],
            "nodeSelector": job.node_labels,
            "tolerations": tolerations_of(job),
            "inMemoryVolumeSize": format_quantity(job.ramdisk_bytes),
        },
    }


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they stand; equal parts written out, for those who read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
    style = "|" if "\n" in data else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _text)
