"""The JobSet: one Job for each slice, started again together."""

from __future__ import annotations

from emergency_ckpt.tools.deploy.gke_job import NODE_POOL, REPLICATED_JOB, GkeJob
from emergency_ckpt.tools.deploy.trainer_pod import (
    BAD_CONFIGURATION_EXIT_CODE,
    COORDINATOR,
    Manifest,
    trainer_pod,
)

EXCLUSIVE_TOPOLOGY = "alpha.jobset.sigs.k8s.io/exclusive-topology"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

_IN_PLACE_BACKOFF_LIMIT = 2147483647
"""Wanted by JobSet for InPlaceRestart: the attempts are counted by ``maxRestarts``."""
_POD_FAILURE_POLICY = "PodFailurePolicy"
"""Reason of a Job that failed by a rule of its podFailurePolicy."""


def jobset(job: GkeJob) -> Manifest:
    """Return the JobSet of ``job``."""
    labels = job.labels("trainer")
    if job.queue is not None:
        labels[QUEUE_LABEL] = job.queue
    metadata: Manifest = {"name": job.name, "namespace": job.namespace, "labels": labels}
    if job.hosts > 1:
        # One slice is one node pool, and no other slice's pods go there. Slices of one host share
        # a pool: each takes all chips of its node.
        metadata["annotations"] = {EXCLUSIVE_TOPOLOGY: NODE_POOL}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            # Names resolve before pods are ready: they wait for each other in their start.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "coordinator": COORDINATOR,
            "successPolicy": {"operator": "All"},
            "failurePolicy": _failure_policy(job),
            "replicatedJobs": [
                {
                    "name": REPLICATED_JOB,
                    "replicas": job.slices,
                    "template": {"spec": _slice(job)},
                }
            ],
        },
    }


def _failure_policy(job: GkeJob) -> Manifest:
    in_place = job.ramdisk_source == "in-place"
    rules: list[Manifest] = [
        {
            "name": "configuration",
            "action": "FailJobSet",
            "onJobFailureReasons": [_POD_FAILURE_POLICY],
            "onJobFailureMessagePatterns": [f"exit code {BAD_CONFIGURATION_EXIT_CODE} "],
        }
    ]
    if not in_place:
        rules.append(
            {
                "name": "disruption",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": [_POD_FAILURE_POLICY],
            }
        )
    return {
        "maxRestarts": job.max_restarts,
        # Blocking: the pods of a life are gone, with their locks, before the next one's start.
        "restartStrategy": "InPlaceRestart" if in_place else "BlockingRecreate",
        "rules": rules,
    }


def _slice(job: GkeJob) -> Manifest:
    """Return the Job of one slice."""
    in_place = job.ramdisk_source == "in-place"
    return {
        "parallelism": job.hosts,
        "completions": job.hosts,
        "completionMode": "Indexed",
        "backoffLimit": _IN_PLACE_BACKOFF_LIMIT if in_place else 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "trainer",
                        "operator": "In",
                        "values": [BAD_CONFIGURATION_EXIT_CODE],
                    },
                },
                {
                    # A pod that the cluster took away: in place it is replaced; else its slice
                    # fails by this rule, and the JobSet's rule starts all slices again.
                    "action": "Ignore" if in_place else "FailJob",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": trainer_pod(job),
    }
