"""Accounts, the secret, and the network policies of a job."""

from __future__ import annotations

from emergency_ckpt.tools.deploy.gke_job import METRICS_PORT, PEER_PORT, SERVE_PORT, GkeJob
from emergency_ckpt.tools.deploy.ramdisk_daemon import COMPONENT
from emergency_ckpt.tools.deploy.trainer_pod import SECRET_KEY, Manifest

_ATTEMPT = "jobset.sigs.k8s.io/in-place-restart-attempt"


def service_account(job: GkeJob) -> Manifest:
    """Return the account of the job's pods, to which access to the bucket is bound."""
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata_of(job)}


def secret(job: GkeJob) -> list[Manifest]:
    """Return the Secret, where its bytes were given."""
    if job.secret is None:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {**metadata_of(job), "name": job.secret_name},
            "immutable": True,
            "stringData": {SECRET_KEY: job.secret.decode()},
        }
    ]


def network_policies(job: GkeJob) -> list[Manifest]:
    """Return who may connect to the pods: trainers, the servers of the ramdisks, and Prometheus.

    Trainers are open to each other at every port, because the runtimes of TPU slices choose some of
    theirs; the peers' port and the coordinator's are among them. They go out where they want.
    Servers ask whether trainers are there, and fetch from each other what they drain. No policy
    holds for a trainer on the host's network, nor knows one: servers then are open to all, who
    still have to prove that they know the run's secret.
    """
    trainers, servers = (
        {"podSelector": {"matchLabels": job.labels(component)}}
        for component in ("trainer", COMPONENT)
    )
    watchers = {"kubernetes.io/metadata.name": job.prometheus_namespace}
    to_trainers: list[Manifest] = [
        {"from": [trainers]},
        {"from": [{"namespaceSelector": {"matchLabels": watchers}}], "ports": _tcp(METRICS_PORT)},
    ]
    to_servers: Manifest = {"ports": _tcp(SERVE_PORT)}
    if not job.host_network:
        to_servers = {"from": [trainers, servers], **to_servers}
    policies: list[Manifest] = []
    if job.ramdisk_source == "daemonset":
        to_trainers.append({"from": [servers], "ports": _tcp(PEER_PORT)})
        policies.append(_policy(job, COMPONENT, f"{job.name}-{COMPONENT}", [to_servers]))
    if not job.host_network:
        policies.insert(0, _policy(job, "trainer", job.name, to_trainers))
    return policies


def _tcp(port: int) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port}]


def restart_agent_access(job: GkeJob) -> list[Manifest]:
    """Return what JobSet's restart agent may do: watch JobSets, and write one annotation of pods.

    A role cannot name a field, so an admission policy refuses every other change by this account.
    """
    api = "rbac.authorization.k8s.io"
    policy_name = f"{job.namespace}-{job.name}-restart-agent"
    return [
        {
            "apiVersion": f"{api}/v1",
            "kind": "Role",
            "metadata": metadata_of(job),
            "rules": [
                {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
                {
                    "apiGroups": ["jobset.x-k8s.io"],
                    "resources": ["jobsets"],
                    "verbs": ["get", "list", "watch"],
                },
            ],
        },
        {
            "apiVersion": f"{api}/v1",
            "kind": "RoleBinding",
            "metadata": metadata_of(job),
            "subjects": [{"kind": "ServiceAccount", "name": job.name, "namespace": job.namespace}],
            "roleRef": {"apiGroup": api, "kind": "Role", "name": job.name},
        },
        _attempt_policy(job, policy_name),
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": policy_name},
            "spec": {"policyName": policy_name, "validationActions": ["Deny"]},
        },
    ]


def _attempt_policy(job: GkeJob, name: str) -> Manifest:
    user = f"system:serviceaccount:{job.namespace}:{job.name}"
    same_annotations = " && ".join(
        f"variables.{one}.all(key, key == '{_ATTEMPT}'"
        f" || (key in variables.{other} && variables.{one}[key] == variables.{other}[key]))"
        for one, other in (("new", "old"), ("old", "new"))
    )
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["UPDATE"],
                        "resources": ["pods"],
                    }
                ]
            },
            "matchConditions": [
                {"name": "restart-agent", "expression": f"request.userInfo.username == '{user}'"}
            ],
            "variables": [
                {"name": variable, "expression": f"{place}.metadata.?annotations.orValue({{}})"}
                for variable, place in (("new", "object"), ("old", "oldObject"))
            ],
            "validations": [
                {
                    "expression": "object.spec == oldObject.spec"
                    " && object.metadata.?labels.orValue({})"
                    " == oldObject.metadata.?labels.orValue({})"
                    f" && {same_annotations}",
                    "message": f"this account changes the annotation {_ATTEMPT} alone",
                }
            ],
        },
    }


def _policy(job: GkeJob, component: str, name: str, ingress: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {**metadata_of(job), "name": name},
        "spec": {
            "podSelector": {"matchLabels": job.labels(component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def metadata_of(job: GkeJob) -> Manifest:
    """Return the metadata of an object that is called after the job."""
    return {
        "name": job.name,
        "namespace": job.namespace,
        "labels": {"app.kubernetes.io/instance": job.name},
    }
