"""The pod of one host: the trainer, its place in the job, its ramdisk and its secret."""

from __future__ import annotations

import math
import os
from typing import Any

from emergency_ckpt.tools.deploy.gke_job import (
    COORDINATOR_PORT,
    METRICS_PORT,
    NODE_POOL,
    PEER_PORT,
    REPLICATED_JOB,
    SERVE_PORT,
    GkeJob,
    tolerations_of,
)
from emergency_ckpt.tools.deploy.quantity import format_quantity
from emergency_ckpt.tools.job_environment import HOST_INDEX_VARIABLE

Manifest = dict[str, Any]
"""A Kubernetes object, or a part of one. The tests hold each against its schema, strictly."""

USER_ID = 1000
"""User and group of every process but the one that mounts. deploy/Dockerfile makes it."""
RAMDISK_MOUNT = "/ramdisk"
LOCAL_DIR = f"{RAMDISK_MOUNT}/eckpt"
"""Below the mount point, because the mount point of a volume may be open to a group."""
SECRET_MOUNT = "/etc/eckpt"  # noqa: S105  a path
SECRET_KEY = "secret"  # noqa: S105  the name of a file
SECRET_MODE = 0o440
"""With the pod's group: root owns the files of a Secret, and the trainer is not root."""
RAMDISK_DATA = "ramdisk/data"
"""Below ``host_directory``, on the mounted tmpfs. A pod that asks for it cannot start while that is
not mounted, and write to the node's disk instead."""
HOST_EVENTS = "events"
"""Below ``host_directory``: on the node's disk, where it outlives pods, DaemonSet and RAM."""
EVENTS_MOUNT = "/events"
GKE_DRIVER = "multitier-checkpoint.csi.storage.gke.io"

BAD_CONFIGURATION_EXIT_CODE = os.EX_CONFIG
"""Exit status of a trainer that no restart mends."""
IN_PLACE_EXIT_CODE = 101
"""Exit status by which the restart agent asks for all containers of its pod to start again."""
_AGENT_PROBE_PORT = 8081

LOCKED_MEMORY_KIB = 1 << 36
"""The limit that Google's pages name. 1 << 36 KiB are more than any host has."""
LOCKED_MEMORY_SCRIPT = """\
ulimit -l "$1"
user=$2
shift 2
exec setpriv --reuid "$user" --regid "$user" --clear-groups --inh-caps -all --no-new-privs "$@"
"""
"""Only root may raise the limit: a container gives its capabilities to no other user. What follows
has the limit, the pod's user and no capability."""


def trainer_pod(job: GkeJob) -> Manifest:
    """Return the pod template of every process of ``job``."""
    in_place = job.ramdisk_source == "in-place"
    spec: Manifest = {
        "serviceAccountName": job.name,
        "automountServiceAccountToken": in_place,  # the restart agent alone asks the API server
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_period_s
        + (math.ceil(job.drain_s) if in_place else 0),
        **on_its_nodes(job),
        "securityContext": pod_security(),
    }
    if job.host_network:
        # The names of the headless service are still resolved by the cluster.
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    spec["initContainers"] = [
        *([_last_server(job), _restart_agent(job)] if in_place else []),
        _doctor(job),
    ]
    spec["containers"] = [_trainer(job)]
    spec["volumes"] = [
        *_host_volumes(job),
        secret_volume(job),
        {"name": "tmp", "emptyDir": {}},
    ]
    return {"metadata": {"labels": job.labels("trainer")}, "spec": spec}


def host_directory(job: GkeJob) -> str:
    """Return the directory of ``job`` on each of its nodes. No other job has it."""
    return f"/var/lib/eckpt/{job.namespace}.{job.name}"


def on_its_nodes(job: GkeJob) -> Manifest:
    """Return the part of a pod's spec that chooses its node."""
    found: Manifest = {"nodeSelector": job.node_labels, "tolerations": tolerations_of(job)}
    if job.node_pools:
        pools = {"key": NODE_POOL, "operator": "In", "values": list(job.node_pools)}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [pools]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        found["affinity"] = {"nodeAffinity": required}
    return found


def pod_security() -> Manifest:
    """Return the security context of pods without root."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Manifest:
    """Return the security context of containers that need no right of their own."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def root_security(privileged: bool = True) -> Manifest:
    """Return the security context of a container that starts as root."""
    rights: Manifest = {"privileged": True}
    if not privileged:
        add = ["SETGID", "SETUID", "SYS_RESOURCE"]
        rights = container_security() | {"capabilities": {"drop": ["ALL"], "add": add}}
    return rights | {"runAsNonRoot": False, "runAsUser": 0, "readOnlyRootFilesystem": True}


def secret_volume(job: GkeJob) -> Manifest:
    """Return the volume with the run's secret."""
    return {
        "name": "secret",
        "secret": {
            "secretName": job.secret_name,
            "defaultMode": SECRET_MODE,
            "items": [{"key": SECRET_KEY, "path": SECRET_KEY}],
        },
    }


_POD_IP: Manifest = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def secret_mount() -> Manifest:
    """Return the mount of ``secret_volume``."""
    return {"name": "secret", "mountPath": SECRET_MOUNT, "readOnly": True}


def server(job: GkeJob, service: str, mounts: list[Manifest], *drain: str) -> Manifest:
    """Return the container that serves the ramdisk, and drains it when the job is over.

    ``service``: the name that leads to all servers of the job; ``drain``: options that say when.
    """
    return {
        "name": "serve",
        "image": job.image,
        "command": [
            *("eckpt", "serve"),
            *("--local-dir", LOCAL_DIR, "--run-id", job.run_name),
            *("--secret-file", f"{SECRET_MOUNT}/{SECRET_KEY}"),
            *("--bind", "$(POD_IP)", "--port", str(SERVE_PORT)),
            *("--drain-to", job.directory, "--peers", f"{service}:{SERVE_PORT}"),
            *("--trainers", f"{job.name}:{PEER_PORT}", *drain),
        ],
        "env": [
            _POD_IP,
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "HOME", "value": "/tmp"},  # noqa: S108  the pod's own
        ],
        "ports": [{"name": "serve", "containerPort": SERVE_PORT}],
        "securityContext": container_security(),
        "volumeMounts": mounts,
    }


def _last_server(job: GkeJob) -> Manifest:
    """Return the sidecar that drains the pods' RAM when they end.

    The kubelet gives it the pod's grace period when the pod is deleted, after the trainer has
    ended, and none at a restart in place.
    """
    when = ("--drain-at-stop", str(job.grace_period_s))
    return {**server(job, job.name, _mounts(), *when), "restartPolicy": "Always"}


def _trainer(job: GkeJob) -> Manifest:
    resources: Manifest = {"limits": {"google.com/tpu": str(job.chips_per_host)}}
    if job.memory_bytes is not None:
        resources["limits"]["memory"] = format_quantity(job.memory_bytes)
        resources["requests"] = {"memory": format_quantity(job.memory_bytes)}
    container: Manifest = {
        "name": "trainer",
        "image": job.image,
        "command": list(job.command),
        "env": [*_place_in_the_job(job), *_settings(job)],
        "ports": [
            {"name": "coordinator", "containerPort": COORDINATOR_PORT},
            {"name": "peers", "containerPort": PEER_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "resources": resources,
        "securityContext": container_security(),
        "volumeMounts": [*_mounts(), *events_mount(job)],
    }
    if job.ramdisk_source == "in-place":
        # One that hangs when its pod ends must leave the rest of the grace period to the drain.
        container["command"] = [
            *("timeout", f"--kill-after={job.grace_period_s}", "0", *job.command)
        ]
        container["restartPolicy"] = "Never"
        container["restartPolicyRules"] = [
            {
                "action": "RestartAllContainers",
                "exitCodes": {"operator": "NotIn", "values": [0, BAD_CONFIGURATION_EXIT_CODE]},
            }
        ]
    if job.tpu_rights != "none":
        container["command"] = [
            *("/bin/sh", "-euc", LOCKED_MEMORY_SCRIPT, "sh"),
            *(str(LOCKED_MEMORY_KIB), str(USER_ID), *container["command"]),
        ]
        container["securityContext"] = root_security(job.tpu_rights == "privileged")
    return container


def _doctor(job: GkeJob) -> Manifest:
    """Return the check of the host before its trainer starts, whose log names what is missing.

    Storage is not among what it checks: where that is down, a restore from RAM must go on.
    """
    return {
        "name": "doctor",
        "image": job.image,
        "command": [
            *("eckpt", "doctor", "--local-dir", LOCAL_DIR, "--run-id", job.run_name),
            *("--secret-file", f"{SECRET_MOUNT}/{SECRET_KEY}"),
            *("--state-gib", f"{job.state_bytes / (1 << 30):.6g}", "--slices", str(job.slices)),
            *("--hosts-per-slice", str(job.hosts), "--placement", job.placement),
            *("--local-keep-last-n", str(job.keep_steps)),
            *("--host-state-mib", f"{job.host_state_bytes / (1 << 20):.6g}"),
        ],
        "env": [{"name": "HOME", "value": "/tmp"}],  # noqa: S108  the pod's own
        "securityContext": container_security(),
        "volumeMounts": _mounts(),
    }


def _mounts() -> list[Manifest]:
    return [
        {"name": "ramdisk", "mountPath": RAMDISK_MOUNT},
        secret_mount(),
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  the pod's own
    ]


def events_mount(job: GkeJob) -> list[Manifest]:
    """Return the mount of the event log where it is not in the ramdisk."""
    if job.ramdisk_source != "daemonset":
        return []
    return [{"name": "events", "mountPath": EVENTS_MOUNT}]


def _place_in_the_job(job: GkeJob) -> list[Manifest]:
    """Return the variables that ``job_environment.JobEnvironment`` reads.

    JAX's own detection of Kubernetes takes the pods of one Job for all processes, which are those
    of one slice. So the id of a process is made from both indices, and the count is written out.
    """
    return [
        {"name": "ECKPT_COORDINATOR_ADDRESS", "value": job.coordinator_address},
        {"name": "ECKPT_PROCESS_COUNT", "value": str(job.process_count)},
        {"name": "ECKPT_SLICE_COUNT", "value": str(job.slices)},
        _from_annotation("ECKPT_SLICE_INDEX", "jobset.sigs.k8s.io/job-index"),
        _from_annotation(HOST_INDEX_VARIABLE, "batch.kubernetes.io/job-completion-index"),
        {"name": "ECKPT_DEVICES_PER_HOST", "value": str(job.devices_per_host)},
        {"name": "ECKPT_LOCAL_DIR", "value": LOCAL_DIR},
        _POD_IP | {"name": "ECKPT_BIND_HOST"},
    ]


def _settings(job: GkeJob) -> list[Manifest]:
    observers = f"event_log prometheus({METRICS_PORT}) hang({job.hang_timeout_s:g})"
    if job.host_network:  # on any other GKE's server answers, which has nothing of the machine
        observers += " notices(gce)"
    values = {
        "ECKPT_DIR": job.directory,
        "ECKPT_RUN_ID": job.run_name,
        "ECKPT_SECRET_FILE": f"{SECRET_MOUNT}/{SECRET_KEY}",
        "ECKPT_PEER_PORT": str(PEER_PORT),
        "ECKPT_EVENT_LOG": EVENTS_MOUNT if events_mount(job) else f"{RAMDISK_MOUNT}{EVENTS_MOUNT}",
        "ECKPT_PREEMPTION_GRACE_S": str(job.grace_s),
        "ECKPT_OBSERVERS": observers,
        "ECKPT_LOCAL_KEEP_LAST_N": str(job.keep_steps),
        "ECKPT_PLACEMENT": job.placement,
        "HOME": "/tmp",  # noqa: S108  the pod's own
        "JAX_COMPILATION_CACHE_DIR": job.compilation_cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "PYTHONUNBUFFERED": "1",
    }
    if job.ramdisk_source == "daemonset":
        values["ECKPT_EXTRA_HOLDERS"] = f"{job.name}-ramdisk:{SERVE_PORT}"
    return [{"name": name, "value": value} for name, value in values.items()]


def _from_annotation(name: str, annotation: str) -> Manifest:
    path = f"metadata.annotations['{annotation}']"
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _host_volumes(job: GkeJob) -> list[Manifest]:
    match job.ramdisk_source:
        case "daemonset":
            return [
                {
                    "name": name,
                    "hostPath": {"path": f"{host_directory(job)}/{place}", "type": "Directory"},
                }
                for name, place in (("ramdisk", RAMDISK_DATA), ("events", HOST_EVENTS))
            ]
        case "in-place":
            size = format_quantity(job.ramdisk_bytes)
            return [{"name": "ramdisk", "emptyDir": {"medium": "Memory", "sizeLimit": size}}]
        case "gke-driver":
            return [{"name": "ramdisk", "csi": {"driver": GKE_DRIVER}}]


def _restart_agent(job: GkeJob) -> Manifest:
    """Return JobSet's agent as a sidecar.

    Its startup probe holds the trainer back until all pods have reached the same attempt.
    """
    assert job.restart_agent_image is not None, "checked by GkeJob"
    probe = {"path": "/barrier-is-down", "port": _AGENT_PROBE_PORT}
    return {
        "name": "restart-agent",
        "image": job.restart_agent_image,
        "restartPolicy": "Always",
        "restartPolicyRules": [
            {
                "action": "RestartAllContainers",
                "exitCodes": {"operator": "In", "values": [IN_PLACE_EXIT_CODE]},
            }
        ],
        "env": [
            _from_annotation("JOBSET_NAME", "jobset.sigs.k8s.io/jobset-name"),
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "IN_PLACE_RESTART_EXIT_CODE", "value": str(IN_PLACE_EXIT_CODE)},
        ],
        "startupProbe": {"httpGet": probe, "periodSeconds": 1, "failureThreshold": 3600},
        "securityContext": container_security(),
    }


COORDINATOR = {"replicatedJob": REPLICATED_JOB, "jobIndex": 0, "podIndex": 0}
"""The pod with process 0, whose name is ``GkeJob.coordinator_address``."""
