"""Faults of a description are named before a manifest is written, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubernetes_rules import GKE, edited, words
from looks import USAGE_EXIT_CODE, eckpt_here


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ramdisk_gib": "59"}, "a ramdisk of 59Gi is smaller than the saves need: 61441Mi"),
        ({"ramdisk_gib": "60"}, "on each host, for 2 slots of its part of 60Gi with all_but"),
        (
            {"ramdisk_gib": "60", "local_keep_last_n": "2"},
            "need: 92161Mi on each host, for 3 slots",
        ),
        ({"ramdisk_gib": "39", "placement": "striped(2)"}, "need: 40961Mi on each host"),
        (
            {"ramdisk_gib": "60.1", "host_state_mib": "512"},
            "need: 64513Mi on each host, for 2 slots of its part of 60Gi with all_but_primary, each"
            " with 3 host states of 512Mi",
        ),
        ({"placement": "striped(0)"}, "placement 'striped(0)': the number of copies is 1 or more"),
        ({"memory_gib": "61"}, "a memory limit of 61Gi must be more than the ramdisk, 61Gi"),
        ({"hosts": "3"}, "--hosts 3 is more than the topology has: 2x4 of v5e has 2 hosts"),
        ({"hosts": "1"}, "--hosts 1 is fewer than the topology has"),
        ({"hosts": "0"}, "--hosts must be 1 to 9999, not 0"),
        ({"slices": "0"}, "--slices must be 1 to 999, not 0"),
        ({"topology": "2x4x"}, "--topology '2x4x' is no topology of v5e, such as 2x4"),
        ({"topology": "٤x٤"}, "is no topology"),
        ({"topology": "2x2x2"}, "--topology '2x2x2' is no topology of v5e, such as 2x4"),
        (
            {"tpu_type": "v5p", "topology": "2x4"},
            "--topology '2x4' is no topology of v5p, such as 2x2x4",
        ),
        ({"topology": "1x1"}, "--topology 1x1 has 1 chips"),
        ({"tpu_type": "v9"}, "--tpu-type must be one of v4, v5e, v5p, v6e, tpu7x, not 'v9'"),
        (
            {"machine_type": "n2-standard-64"},
            "'n2-standard-64' is no machine with v5e chips: ct5lp",
        ),
        ({"machine_type": "ct6e-standard-8t"}, "is no machine with v5e chips"),
        (
            {"machine_type": "ct5lp-hightpu-8t", "topology": "4x4"},
            "--topology 4x4 has 16 chips, and ct5lp-hightpu-8t has 8, which are a slice by",
        ),
        ({"machine_type": "ct5lp-hightpu-8t"}, "2x4 of v5e has 1 hosts of 8 chips"),
        ({"name": "Train"}, "--name 'Train' must be"),
        ({"name": "t" * 44}, "must be 1 to 42 of a-z"),
        ({"namespace": "a_b"}, "--namespace 'a_b'"),
        ({"run_id": "../x"}, "--run-id '../x'"),
        ({"secret": ""}, "no secret: give --secret NAME"),
        ({"secret": "A b"}, "--secret 'A b' is not a name"),
        ({"dir": "/mnt/run7"}, "--dir '/mnt/run7' must be a directory in a bucket"),
        ({"dir": "gs://bucket"}, "must be a directory in a bucket"),
        ({"dir": "gs://bucket/$(JOB)"}, "without spaces and the characters"),
        ({"dir": "gs://bucket/run#7"}, "Orbax would store arrays elsewhere"),
        ({"dir": "gs://bucket/../run"}, "Orbax would store arrays elsewhere"),
        ({"image": "a b"}, "--image 'a b'"),
        ({"local_keep_last_n": "0"}, "--local-keep-last-n must be 1 to 64"),
        ({"gke": f"{GKE}/gke-driver.yaml", "ramdisk_gib": "60"}, "and 256Mi of event log"),
        ({"gke": f"{GKE}/in-place.yaml", "ramdisk_gib": "61"}, "needs --restart-agent-image"),
        ({"restart_agent_image": "a:1"}, "--restart-agent-image is given, and daemonset.yaml has"),
        ({"restart_agent_image": "a b"}, "--restart-agent-image 'a b' is not a name of an image"),
    ],
)
def test_fault_is_named(
    changes: dict[str, str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words(**changes)
    if "gke" in changes:  # the helper writes that of the DaemonSet behind it
        at = len(arguments) - arguments[::-1].index("--gke") - 1
        del arguments[at : at + 2]
    try:
        status = eckpt_here(*arguments)
    except SystemExit as stopped:  # argparse, for a value that is none
        status = stopped.code
    assert status == USAGE_EXIT_CODE
    out, err = capsys.readouterr()
    assert problem in err
    assert out == ""


def test_faults_are_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert eckpt_here(*words(ramdisk_gib="1", hosts="4", secret="", name="A")) == USAGE_EXIT_CODE
    err = capsys.readouterr().err
    for problem in ("--name", "no secret", "--hosts 4", "a ramdisk of 1Gi"):
        assert problem in err


def test_missing_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = words()
    assert eckpt_here(*arguments[: arguments.index("--")]) == USAGE_EXIT_CODE
    assert "no program was given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("${SECRET}", "${SECRETS}", "placeholder ${SECRETS}, which stands for nothing"),
        ("Seconds: 30", "Seconds: 15", "Seconds 15 of the pod is less than ECKPT_PREEMPTION_GRACE"),
        ("image: python:", "image: python", "of the privileged container 'mount' must end with"),
        ("kind: JobSet", "kind: [", "daemonset.yaml is no YAML"),
        ("replicas: ${SLICES}", "replicas: some", "replicas is 'some', which is no number"),
        ("value: '25.0'", "value: 25s", "ECKPT_PREEMPTION_GRACE_S '25s' is no number of seconds"),
        ("kind: JobSet", "sort: JobSet", "has no objects of Kubernetes"),
    ],
)
def test_fault_of_an_edited_template_is_named(
    old: str, new: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = new if old != "image: python:" else f"{new}@sha256:short #"
    template = edited(tmp_path, "daemonset", (old, changed))
    assert eckpt_here(*words(template=template)) == USAGE_EXIT_CODE
    out, err = capsys.readouterr()
    assert problem in err
    assert out == ""


def test_program_without_a_template_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("plan", "--slices", "4", "--hosts", "2", "--state-gib", "8")
    assert eckpt_here(*job, "--", "python") == USAGE_EXIT_CODE
    assert "a program after -- needs --gke" in capsys.readouterr().err
    assert eckpt_here(*job, "--gke", GKE / "daemonset.yaml", "--", "python") == USAGE_EXIT_CODE
    assert "--gke needs --ramdisk-gib" in capsys.readouterr().err


def test_template_with_empty_lists_is_filled(tmp_path: Path) -> None:
    template = tmp_path / "pod.yaml"
    text = "kind: Pod\nspec:\n  initContainers:\n  containers:\n  - name: t\n    env:\n"
    template.write_text(text)
    assert eckpt_here(*words(template=template)) == 0


def test_template_of_other_bytes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "daemonset.yaml"
    template.write_bytes(b"kind: \xff")
    assert eckpt_here(*words(template=template)) == USAGE_EXIT_CODE
    assert "daemonset.yaml is no UTF-8" in capsys.readouterr().err
