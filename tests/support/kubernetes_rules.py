"""Manifests held against their schemas, strictly, and pods as a kubelet would start them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = "1.36.0"
"""The first version that has RestartAllContainers without a feature gate."""

GKE = Path(__file__).parents[2] / "deploy" / "gke"
_GOLDEN = Path(__file__).parents[1] / "golden"
_JOBSET = jsonschema.Draft202012Validator(
    json.loads((_GOLDEN / "jobset_v1alpha2_fields.json").read_text())
)
_CHECKPOINT_CONFIGURATION = jsonschema.Draft202012Validator(
    {
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": "checkpointing.gke.io/v1"},
            "kind": {},
            "metadata": {"type": "object"},
            "spec": {
                "type": "object",
                "additionalProperties": False,
                "required": ["cloudStorageBucketName", "inMemoryVolumeSize"],
                "properties": {
                    "cloudStorageBucketName": {"type": "string"},
                    "inMemoryVolumeSize": {"type": "string", "pattern": "^[0-9]+[KMGT]i$"},
                    "nodeSelector": {"type": "object", "additionalProperties": {"type": "string"}},
                    "tolerations": {"type": "array", "items": {"type": "object"}},
                },
            },
        },
    }
)

_POD_MONITORING = jsonschema.Draft202012Validator(
    {
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": "monitoring.googleapis.com/v1"},
            "kind": {},
            "metadata": {"type": "object"},
            "spec": {
                "type": "object",
                "additionalProperties": False,
                "required": ["selector", "endpoints"],
                "properties": {
                    "selector": {"type": "object", "required": ["matchLabels"]},
                    "endpoints": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["port"],
                            "properties": {
                                "port": {"type": "string"},
                                "interval": {"type": "string", "pattern": "^[0-9]+s$"},
                            },
                        },
                    },
                },
            },
        },
    }
)

SOURCES: dict[str, list[str]] = {
    "daemonset": [],
    # There the event log is in the ramdisk.
    "in-place": ["--restart-agent-image", "registry.example/agent:1", "--ramdisk-gib", "62"],
    "gke-driver": ["--ramdisk-gib", "62"],
}
_OPTIONS = {
    "--name": "train",
    "--image": "registry.example/trainer:1",
    "--dir": "gs://bucket/run7",
    "--slices": "3",
    "--hosts": "2",
    "--tpu-type": "v5e",
    "--topology": "2x4",
    "--state-gib": "60",
    "--ramdisk-gib": "61",
    "--secret": "train-secret",
}


def words(
    source: str = "daemonset", *extra: str, template: Path | None = None, **changes: str
) -> list[str]:
    """Return the arguments of ``eckpt`` for a job of 3 slices with 2 hosts each.

    ``template``: an edited one instead of that of ``source``.
    """
    options = _OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    pairs = [word for pair in options.items() for word in pair]
    chosen = ["--gke", str(template or GKE / f"{source}.yaml"), *SOURCES[source], *extra]
    return ["plan", *pairs, *chosen, "--", "python", "/app/train.py"]


def edited(directory: Path, source: str, *edits: tuple[str, str]) -> Path:
    """Return a copy of a template in which each text stands that takes the place of another."""
    text = (GKE / f"{source}.yaml").read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    path = directory / f"{source}.yaml"
    path.write_text(text)
    return path


def without_rights(manifests: list[Manifest]) -> list[Manifest]:
    """Return the manifests as the templates say for sites that give trainers no rights."""
    for spec in pod_specs(manifests):
        for container in spec["containers"]:
            if container["name"] == "trainer":
                container["command"] = container["command"][6:]
                doctor = next(each for each in spec["initContainers"] if each["name"] == "doctor")
                container["securityContext"] = doctor["securityContext"]
    return manifests


Manifest = dict[str, Any]


class InvalidManifest(AssertionError):
    """A manifest has a field that its kind does not have, or a value of another type."""


def check_manifest(manifest: Manifest) -> None:
    """Raise InvalidManifest unless every field is known and of its type."""
    kind = manifest["kind"]
    try:
        if kind == "CheckpointConfiguration":
            _CHECKPOINT_CONFIGURATION.validate(manifest)
        elif kind == "PodMonitoring":
            _POD_MONITORING.validate(manifest)
        elif kind == "JobSet":
            _JOBSET.validate(manifest)
            _check_metadata(manifest["metadata"])
            for replicated in manifest["spec"]["replicatedJobs"]:
                spec = replicated["template"]["spec"]
                _check_core({"apiVersion": "batch/v1", "kind": "Job", "spec": spec})
        else:
            _check_core(manifest)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        raise InvalidManifest(f"{kind}: {error.message}") from error


def _check_metadata(metadata: Manifest) -> None:
    _check_core({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})


def _check_core(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def manifests_in(text: str) -> list[Manifest]:
    """Return the objects of a YAML stream."""
    return [each for each in yaml.safe_load_all(text) if each is not None]


def one(manifests: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """Return the one object of ``kind``, or of ``kind`` and ``name``."""
    (found,) = [
        each
        for each in manifests
        if each["kind"] == kind and name in (None, each["metadata"]["name"])
    ]
    return found


def pod_specs(manifests: list[Manifest]) -> list[Manifest]:
    """Return the spec of every pod template."""
    specs: list[Manifest] = []
    for each in manifests:
        if each["kind"] == "DaemonSet":
            specs.append(each["spec"]["template"]["spec"])
        elif each["kind"] == "JobSet":
            jobs = each["spec"]["replicatedJobs"]
            specs += [job["template"]["spec"]["template"]["spec"] for job in jobs]
    return specs


@dataclass(frozen=True)
class StartedContainer:
    """A container as the kubelet starts it: its command and its whole own environment."""

    command: list[str]
    environ: dict[str, str]


def started_trainers(manifests: list[Manifest]) -> Iterator[StartedContainer]:
    """Yield the trainer of each pod of the JobSet, in the order of the slices and their hosts."""
    jobset = one(manifests, "JobSet")
    name = jobset["metadata"]["name"]
    for replicated in jobset["spec"]["replicatedJobs"]:
        job = replicated["template"]["spec"]
        for slice_index in range(replicated["replicas"]):
            for host_index in range(job["completions"]):
                annotations = {
                    "jobset.sigs.k8s.io/jobset-name": name,
                    "jobset.sigs.k8s.io/job-index": str(slice_index),
                    "batch.kubernetes.io/job-completion-index": str(host_index),
                }
                (container,) = job["template"]["spec"]["containers"]
                yield started(container, annotations, pod_ip="127.0.0.1")


def started(
    container: Manifest, annotations: Mapping[str, str], *, pod_ip: str
) -> StartedContainer:
    """Return ``container`` with its fields of the pod filled in, and ``$`` expanded.

    A variable takes the place of its ``$(NAME)``, and ``$`` that of ``$$``. All else stays.
    """
    environ: dict[str, str] = {}
    for variable in container.get("env", []):
        if "value" in variable:
            environ[variable["name"]] = variable["value"]
            continue
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        annotation = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
        if annotation is not None:
            environ[variable["name"]] = annotations[annotation[1]]
        else:
            environ[variable["name"]] = {"status.podIP": pod_ip}[path]
    command = [
        re.sub(
            r"\$\$|\$\(([^)]*)\)",
            lambda found: "$" if found[1] is None else environ.get(found[1], found[0]),
            word,
        )
        for word in container["command"]
    ]
    return StartedContainer(command, environ)
