"""Faults of a description are named before a manifest is written, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubernetes_rules import words
from looks import USAGE_EXIT_CODE, eckpt_here


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ramdisk": "59Gi"}, "--ramdisk 59Gi is smaller than the saves need: 60Gi"),
        ({"host_state": "5Mi"}, "on each host, for 2 slots of its part of 60Gi with all_but"),
        ({"ramdisk": "60Gi", "keep_steps": "2"}, "need: 90Gi on each host, for 3 slots"),
        ({"ramdisk": "39Gi", "placement": "striped(2)"}, "need: 40Gi on each host"),
        ({"placement": "striped(0)"}, "placement 'striped(0)': the number of copies is 1 or more"),
        ({"memory": "60Gi"}, "--memory 60Gi must be more than --ramdisk 60Gi"),
        ({"hosts": "3"}, "--hosts 3 is more than the topology has: 2x4 of v5e has 2 hosts"),
        ({"hosts": "1"}, "--hosts 1 is fewer than the topology has"),
        ({"hosts": "0"}, "--hosts must be 1 to 9999, not 0"),
        ({"slices": "0"}, "--slices must be 1 to 999, not 0"),
        ({"topology": "2x4x2"}, "--topology '2x4x2' is none of v5e: 1x1, 2x2, 2x4, 4x4,"),
        ({"topology": "7x12"}, "--topology '7x12' is none of v5e"),
        ({"topology": "٤x٤"}, "is none of v5e"),
        ({"topology": "1x1"}, "--topology 1x1 has 1 chips"),
        ({"tpu_type": "v9"}, "--tpu-type must be one of v4, v5e, v5p, v6e, tpu7x, not 'v9'"),
        ({"tpu_type": "v5p", "topology": "2x2x3"}, "is none of v5p: 2x2x1, 2x2x2, 2x2x4, 2x4x4"),
        ({"tpu_type": "v5p", "topology": "8x4x4"}, "three multiples of 4 in rising order"),
        ({"tpu_type": "tpu7x", "topology": "16x24x28"}, "with at most 9216 chips"),
        (
            {"machine_type": "n2-standard-64"},
            "'n2-standard-64' is no machine with v5e chips: ct5lp",
        ),
        ({"machine_type": "ct6e-standard-8t"}, "is no machine with v5e chips"),
        (
            {"machine_type": "ct5lp-hightpu-8t", "topology": "4x4"},
            "--machine-type ct5lp-hightpu-8t is a slice 2x4 by itself, not 4x4",
        ),
        ({"machine_type": "ct5lp-hightpu-8t"}, "2x4 of v5e has 1 hosts of 8 chips"),
        ({"spot": "", "reservation": "mine"}, "--spot and --reservation exclude each other"),
        ({"reservation": "a/b"}, "--reservation 'a/b' is not a name"),
        ({"node_pools": "a,b/c"}, "--node-pools 'b/c' is not a name"),
        ({"node_selector": "team"}, "'team' is not KEY=VALUE"),
        ({"node_selector": "a/b/c=1"}, "--node-selector a/b/c=1 is no label of Kubernetes"),
        ({"toleration": "a=b"}, "'a=b' is not KEY[=VALUE]:EFFECT"),
        ({"toleration": "a b:NoExecute"}, "--toleration a b= is no label of Kubernetes"),
        ({"prometheus_namespace": "A"}, "--prometheus-namespace 'A' is not a name"),
        ({"name": "Train"}, "--name 'Train' must be"),
        ({"name": "t" * 44}, "must be 1 to 42 of a-z"),
        ({"namespace": "a_b"}, "--namespace 'a_b'"),
        ({"run_id": "../x"}, "--run-id '../x'"),
        ({"secret": ""}, "no secret: give --secret NAME"),
        ({"secret": "A b"}, "--secret 'A b' is not a name"),
        ({"queue": "a b"}, "--queue 'a b'"),
        ({"dir": "/mnt/run7"}, "--dir '/mnt/run7' must be a directory in a bucket"),
        ({"dir": "gs://bucket"}, "must be a directory in a bucket"),
        ({"image": "a b"}, "--image 'a b'"),
        ({"max_restarts": "-1"}, "--max-restarts must be 0 to"),
        ({"keep_steps": "0"}, "--keep-steps must be 1 to 64"),
        ({"preemption_grace_s": "nan"}, "--preemption-grace-s must be above 0"),
        ({"hang_timeout_s": "0"}, "--hang-timeout-s must be above 0 and at most a day, not 0.0"),
        ({"drain_s": "inf"}, "--drain-s must be above 0 and at most a day, not inf"),
        ({"ramdisk_source": "gke-driver"}, "and 256Mi of event log"),
        ({"ramdisk_source": "in-place"}, "--restart-agent-image and --ramdisk-source in-place"),
        ({"mount_image": "debian:12"}, "--mount-image 'debian:12' must end with @sha256:"),
        ({"restart_agent_image": "a:1"}, "--restart-agent-image and --ramdisk-source in-place"),
    ],
)
def test_fault_is_named(
    changes: dict[str, str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words(**changes)
    if "ramdisk_source" in changes:  # the helper writes a valid one behind it
        at = arguments.index("daemonset")
        del arguments[at - 1 : at + 1]
    if "spot" in changes:
        arguments.remove("")
    try:
        status = eckpt_here(*arguments)
    except SystemExit as stopped:  # argparse, for a value that is none
        status = stopped.code
    assert status == USAGE_EXIT_CODE
    out, err = capsys.readouterr()
    assert problem in err
    assert out == ""


def test_faults_are_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert eckpt_here(*words(ramdisk="1Gi", hosts="4", secret="", name="A")) == USAGE_EXIT_CODE
    err = capsys.readouterr().err
    for problem in ("--name", "no secret", "--hosts 4", "--ramdisk 1Gi"):
        assert problem in err


def test_missing_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = words()
    assert eckpt_here(*arguments[: arguments.index("--")]) == USAGE_EXIT_CODE
    assert "no program was given" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "mode"), [("short", 0o600), ("ab" * 32, 0o644)])
def test_secret_file_that_is_none_is_refused(
    text: str, mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    file.chmod(mode)
    assert eckpt_here(*words("daemonset", "--secret-file", str(file))) == USAGE_EXIT_CODE
    out, err = capsys.readouterr()
    assert out == ""
    assert "secret" in err
    assert text not in err
