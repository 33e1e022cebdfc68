"""What ends a job leaves a preemption save its time, in every template as it is shipped."""

from __future__ import annotations

import re

import pytest
from kubernetes_rules import SOURCES, manifests_in, pod_specs
from places import ROOT

from emergency_ckpt.config import Config

END_S = 5.0
"""For threads, JAX and the interpreter, after ``preemption_grace_s``."""


def test_slurm_template_leaves_a_preemption_save_its_time() -> None:
    """Also where Slurm tells the tasks late; it never does so by more than a minute early."""
    script = (ROOT / "deploy" / "slurm" / "train.sbatch").read_text()
    (notice_s,) = re.findall(r"^#SBATCH --signal=TERM@(\d+) ", script, re.MULTILINE)
    assert float(notice_s) >= Config.preemption_grace_s + END_S
    assert "preemption_grace_s" not in script  # the default, then


@pytest.mark.parametrize("source", SOURCES)
def test_trainer_pods_leave_a_preemption_save_its_time(source: str) -> None:
    text = (ROOT / "deploy" / "gke" / f"{source}.yaml").read_text()
    trainers = [
        (spec["terminationGracePeriodSeconds"], float(variable["value"]))
        for spec in pod_specs(manifests_in(text))
        for container in spec["containers"]
        for variable in container.get("env", [])
        if variable["name"] == "ECKPT_PREEMPTION_GRACE_S"
    ]
    assert trainers
    for pod_s, grace_s in trainers:
        assert pod_s >= grace_s + END_S
