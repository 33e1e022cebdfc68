"""Manifests of a job on GKE: valid in every field, and meaning what the job needs."""

from __future__ import annotations

import copy
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_rules import (
    GKE,
    SOURCES,
    InvalidManifest,
    Manifest,
    check_manifest,
    edited,
    manifests_in,
    one,
    pod_specs,
    started,
    started_trainers,
    without_rights,
    words,
)
from launch_support import JobEnvironment
from looks import eckpt_here

from emergency_ckpt.config import Config

GRACE = "ECKPT_PREEMPTION_GRACE_S\n                value: '{}'"
SPOT = (
    (GRACE.format("25.0"), GRACE.format("10.0")),
    ("terminationGracePeriodSeconds: 30", "terminationGracePeriodSeconds: 15"),
)
"""What the head of a template says of spot nodes, but for a label and a toleration."""


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(
        source: str = "daemonset", *extra: str, program: Sequence[str] = (), **changes: Any
    ) -> list[Manifest]:
        assert eckpt_here(*words(source, *extra, **changes), *program) == 0
        return manifests_in(capsys.readouterr().out)

    return run


def containers(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield (pod spec, container) of all, init containers included."""
    for spec in pod_specs(manifests):
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield spec, container


@pytest.mark.parametrize("newline", ["\n", "\r", "\x85", "\u2028", "\x1b"])
def test_argument_of_several_lines_is_an_argument_only(
    newline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"x{newline}---{newline}kind: Pod{newline}"
    assert eckpt_here(*words(), text) == 0
    changed = capsys.readouterr().out
    assert eckpt_here(*words(), "x") == 0
    plain = manifests_in(capsys.readouterr().out)
    manifests = manifests_in(changed)
    assert [each["kind"] for each in manifests] == [each["kind"] for each in plain]
    (trainer,) = [
        each for _, each in containers(manifests) if "/app/train.py" in str(each.get("command"))
    ]
    assert text in str([*trainer["command"], *trainer.get("args", [])][-1])


LIKE_NUMBERS = ("1e-4", "12e4", "0x1p-2", "0b11", "0o17", "1_000", "+.5e3", "1:30", ".inf", "1e400")
LIKE_OTHERS = (
    "y",
    "n",
    "On",
    "NULL",
    "~",
    "",
    "<<",
    "=",
    "2024-01-01",
    "-",
    "---",
    "...",
    "!",
    "x",
)


def test_arguments_like_other_types_are_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the quotes show what kubectl reads: PyYAML reads what PyYAML wrote."""
    given = LIKE_NUMBERS + LIKE_OTHERS
    assert eckpt_here(*words(run_id="12e4"), *given) == 0
    text = capsys.readouterr().out
    assert "".join(f"              - '{argument}'\n" for argument in given) in text
    assert "- '--run-id'\n              - '12e4'\n" in text
    assert "- name: ECKPT_RUN_ID\n                value: '12e4'\n" in text


@pytest.mark.parametrize("source", SOURCES)
def test_text_without_quotes_is_text_in_any_yaml(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys too. One letter may be a truth value, and only a word begins with a letter."""
    assert eckpt_here(*words(source, "--memory-gib", "100"), "--lr") == 0
    text = capsys.readouterr().out
    tokens = [token for token in yaml.scan(text) if isinstance(token, yaml.ScalarToken)]
    read = {token.value: yaml.safe_load(token.value) for token in tokens if token.plain}
    texts = {value for value in read.values() if isinstance(value, str)}
    assert {"apiVersion", "name", "trainer"} <= texts
    assert all(re.fullmatch("[A-Za-z][-./0-9A-Z_a-z]+", each) for each in texts)
    assert {type(value) for value in read.values()} == {str, int, bool}


def test_dollars_of_an_argument_reach_the_program(generate: Any) -> None:
    """As the kubelet expands a command; the template's own references are expanded as before."""
    given = ["$(HOME)", "$$", "a$(b$c$", "$$(HOME)", "${NAME}"]
    manifests = generate(program=given)
    for pod in started_trainers(manifests):
        assert pod.command[-len(given) :] == given
    (server,) = pod_specs([one(manifests, "DaemonSet")])[0]["containers"]
    assert "127.0.0.1" in started(server, {}, pod_ip="127.0.0.1").command


def test_examples_in_the_tree_are_these() -> None:
    assert {path.stem for path in GKE.glob("*.yaml")} == set(SOURCES)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("extra", [[], ["--memory-gib", "100"]])
def test_every_field_of_every_manifest_is_known(
    source: str, extra: list[str], generate: Any
) -> None:
    manifests = generate(source, *extra)
    for manifest in manifests:
        check_manifest(manifest)
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(set(names)) == len(names)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every object in ``value``."""
    if isinstance(value, dict):
        yield path
        for key, each in value.items():
            yield from places(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from places(each, (*path, index))


FREE = {"labels", "annotations", "matchLabels", "nodeSelector", "limits", "requests"}
"""Objects whose names are the user's."""


@pytest.mark.dear
def test_unknown_field_anywhere_in_a_jobset_is_found(generate: Any) -> None:
    jobset = one(generate("in-place", "--memory-gib", "100"), "JobSet")
    found = {
        tuple(step for step in path if isinstance(step, str)): path
        for path in places(jobset)
        if not FREE & set(path)
    }
    assert len(found) > 25
    for path in found.values():
        changed = copy.deepcopy(jobset)
        place = changed
        for step in path:
            place = place[step]
        place["noSuchField"] = 1
        with pytest.raises(InvalidManifest):
            check_manifest(changed)


@pytest.mark.parametrize("source", SOURCES)
def test_processes_have_the_ids_of_the_whole_job(source: str, generate: Any) -> None:
    jobs = [JobEnvironment.from_environ(pod.environ) for pod in started_trainers(generate(source))]
    assert [job.process_index for job in jobs] == list(range(6))
    assert [job.slice_index for job in jobs] == [0, 0, 1, 1, 2, 2]
    assert {(job.process_count, job.slice_count) for job in jobs} == {(6, 3)}
    assert {str(job.local_dir) for job in jobs} == {"/ramdisk/eckpt"}


def test_coordinator_is_the_pod_of_process_0(generate: Any) -> None:
    manifests = generate()
    spec = one(manifests, "JobSet")["spec"]
    place = spec["coordinator"]
    name = f"train-{place['replicatedJob']}-{place['jobIndex']}-{place['podIndex']}.train"
    job = JobEnvironment.from_environ(next(started_trainers(manifests)).environ)
    host, _, port = job.coordinator_address.rpartition(":")
    assert (host, job.process_index) == (name, 0)
    (container,) = pod_specs([one(manifests, "JobSet")])[0]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"coordinator": int(port), "peers": 7411, "metrics": 7413}


def test_variables_of_the_tpu_runtime_are_left_to_gke(generate: Any) -> None:
    for source in SOURCES:
        for _, container in containers(generate(source)):
            names = [variable["name"] for variable in container.get("env", [])]
            assert not [n for n in names if n.startswith(("MEGASCALE_", "TPU_", "JAX_PROCESS"))]


@pytest.mark.parametrize("source", SOURCES)
def test_containers_have_no_rights_but_the_mounting_one(source: str, generate: Any) -> None:
    """On sites that forbid trainers to raise the limit of locked memory."""
    privileged = []
    for spec, container in containers(without_rights(generate(source))):
        pod, own = spec["securityContext"], container["securityContext"]
        assert pod["runAsNonRoot"]
        assert pod["runAsUser"] == pod["fsGroup"] == 1000
        assert own["readOnlyRootFilesystem"]
        assert not spec.get("hostNetwork", False)
        assert not spec.get("hostPID", False)
        if own.get("privileged"):
            privileged.append(container["name"])
            mounts = [mount["name"] for mount in container["volumeMounts"]]
            assert mounts == ["host"]  # no secret where the rights are
        else:
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "runAsUser" not in own
    assert privileged == (["mount"] if source == "daemonset" else [])


@pytest.mark.parametrize("source", SOURCES)
def test_policies_let_only_trainers_reach_the_pods(source: str, generate: Any) -> None:
    manifests = generate(source)
    trainers = {"app.kubernetes.io/instance": "train", "app.kubernetes.io/component": "trainer"}
    open_to: dict[str, list[Manifest]] = {}
    for policy in manifests:
        if policy["kind"] == "NetworkPolicy":
            spec = policy["spec"]
            assert spec["policyTypes"] == ["Ingress"]
            component = spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            open_to[component] = spec["ingress"]
    servers = {**trainers, "app.kubernetes.io/component": "ramdisk"}
    from_trainers, from_servers = (
        {"podSelector": {"matchLabels": labels}} for labels in (trainers, servers)
    )
    peers, serve, metrics = ([{"protocol": "TCP", "port": port}] for port in (7411, 7412, 7413))
    google = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gmp-system"}}}
    wanted: dict[str, Any] = {
        "trainer": [{"from": [from_trainers]}, {"from": [google], "ports": metrics}]
    }
    if source == "daemonset":
        wanted["trainer"].append({"from": [from_servers], "ports": peers})
        wanted["ramdisk"] = [{"from": [from_servers], "ports": serve}]
    assert open_to == wanted
    jobset = one(manifests, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert jobset["template"]["metadata"]["labels"] == trainers


def test_restart_in_place_keeps_the_pods_memory(generate: Any) -> None:
    manifests = generate("in-place")
    spec = one(manifests, "JobSet")["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert spec["failurePolicy"]["restartStrategy"] == "InPlaceRestart"
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (2147483647, "Failed")
    pod = job["template"]["spec"]
    (server, agent, doctor), (trainer,) = pod["initContainers"], pod["containers"]
    # A sidecar before the agent: it runs also while the agent holds the trainer back.
    assert (server["name"], server["restartPolicy"]) == ("serve", "Always")
    assert doctor["name"] == "doctor"  # behind the barrier, and once more at each attempt
    assert agent["restartPolicy"] == "Always"
    for container in (agent, trainer):
        assert [rule["action"] for rule in container["restartPolicyRules"]] == [
            "RestartAllContainers"
        ]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "ramdisk"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "62Gi"}


def test_one_slice_has_a_node_pool_of_its_own(generate: Any) -> None:
    metadata = one(generate("daemonset"), "JobSet")["metadata"]
    assert metadata["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    whole = {"machine_type": "ct5lp-hightpu-8t", "hosts": "1", "ramdisk_gib": "200"}
    assert "annotations" not in one(generate(**whole), "JobSet")["metadata"]


def test_grace_of_pods_follows_the_setting(generate: Any) -> None:
    manifests = generate()
    (pod,) = pod_specs([one(manifests, "JobSet")])
    assert pod["terminationGracePeriodSeconds"] == 30
    (pod,) = pod_specs([one(generate("in-place"), "JobSet")])
    assert pod["terminationGracePeriodSeconds"] == 30 + 900
    command = pod["containers"][0]["command"]
    assert command[-5:] == ["timeout", "--kill-after=30", "0", "python", "/app/train.py"]
    given = next(started_trainers(manifests)).environ["ECKPT_PREEMPTION_GRACE_S"]
    assert float(given) == Config.preemption_grace_s


def test_secret_is_a_file_of_the_pods_group(generate: Any) -> None:
    for source in SOURCES:
        manifests = generate(source)
        assert not [each for each in manifests if each["kind"] == "Secret"]
        for spec in pod_specs(manifests):
            (volume,) = [each for each in spec["volumes"] if each["name"] == "secret"]
            assert volume["secret"]["secretName"] == "train-secret"
            assert volume["secret"]["defaultMode"] == 0o440


def trainer_and_pod(manifests: list[Manifest]) -> tuple[Manifest, Manifest]:
    (pod,) = pod_specs([one(manifests, "JobSet")])
    return pod["containers"][0], pod


def test_trainer_alone_starts_as_root_to_lock_memory(generate: Any) -> None:
    trainer, pod = trainer_and_pod(generate("in-place"))
    own = trainer["securityContext"]
    assert (own["runAsUser"], own["runAsNonRoot"], own["readOnlyRootFilesystem"]) == (
        0,
        False,
        True,
    )
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"], "add": ["SETGID", "SETUID", "SYS_RESOURCE"]}
    for container in pod["initContainers"]:
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "runAsUser" not in container["securityContext"]
    assert pod["securityContext"]["runAsUser"] == 1000


@pytest.mark.skipif(os.geteuid() != 0, reason="starts as root, as the container does")
def test_command_of_the_trainer_raises_the_limit_and_drops_root(generate: Any) -> None:
    trainer, _ = trainer_and_pod(generate())
    shell, options, script, name, limit_kib, user, *program = trainer["command"]
    assert (limit_kib, user, program) == (str(1 << 36), "1000", ["python", "/app/train.py"])
    shown = (
        "id -u; id -G; ulimit -l; grep -E '^(Cap(Prm|Eff|Inh|Amb)|NoNewPrivs)' /proc/self/status"
    )
    done = subprocess.run(
        [shell, options, script, name, "64", user, "/bin/sh", "-c", shown],
        capture_output=True,
        text=True,
        check=True,
    )
    uid, groups, limit, *status = done.stdout.splitlines()
    assert (uid, groups, limit) == ("1000", "1000", "64")
    rights = {line.split()[0]: int(line.split()[1], 16) for line in status}
    assert rights.pop("NoNewPrivs:") == 1
    assert set(rights.values()) == {0}


MACHINES = [
    ("v4", None, "4x8x4", 32, 4, "ct4p-hightpu-4t"),
    ("v5e", None, "2x4", 2, 4, "ct5lp-hightpu-4t"),
    ("v5e", "ct5lp-hightpu-8t", "2x4", 1, 8, "ct5lp-hightpu-8t"),
    ("v5e", "ct5lp-hightpu-1t", "1x1", 1, 1, "ct5lp-hightpu-1t"),
    ("v5p", None, "4x4x12", 48, 4, "ct5p-hightpu-4t"),
    ("v6e", "ct6e-standard-8t", "2x4", 1, 8, "ct6e-standard-8t"),
    ("v6e", None, "16x16", 64, 4, "ct6e-standard-4t"),
    ("tpu7x", None, "2x2x1", 1, 4, "tpu7x-standard-4t"),
    ("tpu7x", None, "4x4x8", 32, 4, "tpu7x-standard-4t"),
]


@pytest.mark.parametrize(("tpu_type", "machine", "topology", "hosts", "chips", "label"), MACHINES)
def test_machine_gives_the_chips_of_a_host(
    tpu_type: str,
    machine: str | None,
    topology: str,
    hosts: int,
    chips: int,
    label: str,
    generate: Any,
) -> None:
    changes = {"tpu_type": tpu_type, "topology": topology, "hosts": str(hosts)}
    changes |= {"ramdisk_gib": "200"} | ({} if machine is None else {"machine_type": machine})
    trainer, pod = trainer_and_pod(generate(**changes))
    assert trainer["resources"]["limits"] == {"google.com/tpu": str(chips)}
    assert pod["nodeSelector"]["node.kubernetes.io/instance-type"] == label
    (devices,) = [e["value"] for e in trainer["env"] if e["name"] == "ECKPT_DEVICES_PER_HOST"]
    assert int(devices) == chips * (2 if tpu_type == "tpu7x" else 1)


def test_pods_and_daemonset_take_the_nodes_of_the_job_alone(generate: Any) -> None:
    specs = pod_specs(generate())
    assert len(specs) == 2
    for spec in specs:
        assert spec["nodeSelector"] == {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
            "cloud.google.com/gke-tpu-topology": "2x4",
            "node.kubernetes.io/instance-type": "ct5lp-hightpu-4t",
        }
        assert spec["tolerations"] == [
            {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}
        ]


def test_spot_nodes_leave_a_save_what_their_kubelet_gives(tmp_path: Path, generate: Any) -> None:
    """As the head of each template says."""
    manifests = generate(template=edited(tmp_path, "daemonset", *SPOT))
    trainer, pod = trainer_and_pod(manifests)
    values = {each["name"]: each.get("value") for each in trainer["env"]}
    assert pod["terminationGracePeriodSeconds"] == 15
    assert float(values["ECKPT_PREEMPTION_GRACE_S"]) == 10
    for manifest in manifests:
        check_manifest(manifest)


def test_paths_of_two_jobs_on_a_node_have_nothing_in_common(generate: Any) -> None:
    """Job B's smaller ramdisk once made A's tmpfs smaller."""
    found: list[set[str]] = []
    for name, namespace in (("a", "x"), ("b", "x"), ("a", "y")):
        manifests = generate(name=name, namespace=namespace)
        volumes = [volume for spec in pod_specs(manifests) for volume in spec["volumes"]]
        paths = {volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume}
        root = f"/var/lib/eckpt/{namespace}.{name}"
        assert paths == {root, f"{root}/ramdisk/data", f"{root}/events"}
        (mount,) = pod_specs([one(manifests, "DaemonSet")])[0]["initContainers"]
        values = {each["name"]: each["value"] for each in mount["env"]}
        assert values["RAMDISK"] == f"{root}/ramdisk"
        found.append(paths)
    assert not found[0] & found[1]
    assert not found[0] & found[2]


def test_metrics_are_read_by_the_prometheus_that_was_named(generate: Any) -> None:
    manifests = generate()
    spec = one(manifests, "PodMonitoring")["spec"]
    trainer, _ = trainer_and_pod(manifests)
    (port,) = [each for each in trainer["ports"] if each["name"] == spec["endpoints"][0]["port"]]
    values = {each["name"]: each.get("value") for each in trainer["env"]}
    assert f"prometheus({port['containerPort']})" in values["ECKPT_OBSERVERS"].split()
    (bound,) = [each for each in trainer["env"] if each["name"] == "ECKPT_BIND_HOST"]
    assert bound["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_trainers_ask_no_machine_that_they_cannot_reach(generate: Any) -> None:
    for source in SOURCES:
        trainer, _ = trainer_and_pod(generate(source))
        values = {each["name"]: each.get("value") for each in trainer["env"]}
        assert "notices(gce)" not in values["ECKPT_OBSERVERS"].split()


def test_program_takes_the_place_of_its_placeholder(generate: Any) -> None:
    text = (GKE / "daemonset.yaml").read_text()
    assert "${PROGRAM}" in text
    assert not [each for each in generate() if "${" in str(each)]
