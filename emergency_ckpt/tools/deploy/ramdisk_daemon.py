"""The DaemonSet that mounts a host's ramdisk and serves it while its trainer is down."""

from __future__ import annotations

from emergency_ckpt.tools.deploy.gke_job import SERVE_PORT, GkeJob
from emergency_ckpt.tools.deploy.trainer_pod import (
    HOST_EVENTS,
    RAMDISK_DATA,
    RAMDISK_MOUNT,
    USER_ID,
    Manifest,
    events_mount,
    host_directory,
    on_its_nodes,
    pod_security,
    root_security,
    secret_mount,
    secret_volume,
    server,
)

COMPONENT = "ramdisk"
_SERVE_GRACE_S = 10

MOUNT_SCRIPT = """\
mkdir -p "$RAMDISK"
if mountpoint -q "$RAMDISK"; then
  mount -o "remount,size=$SIZE_BYTES" "$RAMDISK"
else
  options="size=$SIZE_BYTES,mode=0755,nosuid,nodev,noexec"
  mount -t tmpfs -o "$options,huge=within_size" eckpt "$RAMDISK" ||
    mount -t tmpfs -o "$options" eckpt "$RAMDISK"
fi
for directory in "$RAMDISK/data" "$EVENTS"; do
  mkdir -p -m 0700 "$directory"
  chown -h "$OWNER" "$directory"
done
"""
"""Mounts the job's own tmpfs once in the life of a node, and makes the directory of its event log
on the node's disk; a later start changes the size of the tmpfs and keeps its files.

Nothing inside the owner's directory is touched: a link may lie there. Large pages are left out
where the kernel has none. The remount fails, and changes nothing, when less is asked for than is
in use.
"""


def ramdisk_daemon(job: GkeJob) -> list[Manifest]:
    """Return the DaemonSet, and the headless service whose name leads to all its pods."""
    labels, name = job.labels(COMPONENT), f"{job.name}-{COMPONENT}"
    metadata = {"name": name, "namespace": job.namespace, "labels": labels}
    daemon: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
            "template": {"metadata": {"labels": labels}, "spec": _pod(job)},
        },
    }
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "selector": labels,
            "ports": [{"name": "serve", "port": SERVE_PORT, "targetPort": "serve"}],
        },
    }
    return [daemon, service]


def _pod(job: GkeJob) -> Manifest:
    return {
        "serviceAccountName": job.name,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _SERVE_GRACE_S,
        **on_its_nodes(job),
        "securityContext": pod_security(),
        "initContainers": [_mounter(job)],
        "containers": [_server(job)],
        "volumes": [
            {
                "name": "host",
                "hostPath": {"path": host_directory(job), "type": "DirectoryOrCreate"},
            },
            secret_volume(job),
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def _mounter(job: GkeJob) -> Manifest:
    """Return the one container with rights.

    To mount for the node takes CAP_SYS_ADMIN in the node's mount namespace, which Kubernetes gives
    to privileged containers alone (mount propagation ``Bidirectional``). It ends before the server
    starts, reads nothing from the network, and has no secret. Its image is not the trainer's.
    """
    return {
        "name": "mount",
        "image": job.mount_image,
        "command": ["/bin/sh", "-euc", MOUNT_SCRIPT],
        "env": [
            {"name": "RAMDISK", "value": f"{host_directory(job)}/{RAMDISK_DATA.partition('/')[0]}"},
            {"name": "EVENTS", "value": f"{host_directory(job)}/{HOST_EVENTS}"},
            {"name": "SIZE_BYTES", "value": str(job.ramdisk_bytes)},
            {"name": "OWNER", "value": f"{USER_ID}:{USER_ID}"},
        ],
        "securityContext": root_security(),
        "volumeMounts": [
            {
                "name": "host",
                "mountPath": host_directory(job),
                "mountPropagation": "Bidirectional",
            }
        ],
    }


def _server(job: GkeJob) -> Manifest:
    mounts: list[Manifest] = [
        {"name": "host", "mountPath": RAMDISK_MOUNT, "subPath": RAMDISK_DATA},
        *(mount | {"name": "host", "subPath": HOST_EVENTS} for mount in events_mount(job)),
        secret_mount(),
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  the pod's own
    ]
    return server(job, f"{job.name}-{COMPONENT}", mounts, "--drain-after", f"{job.drain_s:g}")
