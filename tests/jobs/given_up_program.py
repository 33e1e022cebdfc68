"""A save that storage never answers is given up, and the program ends."""

from __future__ import annotations

import os
import sys

import jax.numpy as jnp
from fake_gcs import FaultRule, GcsControl

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import SaveFailed

WAIT_S = 120.0


def main(target: str, local_dir: str) -> int:
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    state = {"x": jnp.arange(1000.0)}
    with EmergencyCheckpointer(
        dir="gs://bucket/run",
        local_dir=local_dir,
        local_save_every=0,
        save_every=1,
        persistent_timeout_s=20.0,  # also for what storage answers
    ) as ckpt:
        ckpt.restore(state=state)
        rule = control.add_fault(
            FaultRule(kind="delay", delay_s=600, method="POST", target=f"bucket/run/{target}")
        )
        ckpt.save(step=5, state=state)
        ckpt.wait_until_finished(WAIT_S)
        try:
            ckpt.check_for_errors()
        except SaveFailed as error:
            print(error)
        assert any(each.rule_id == rule and each.hit for each in control.fault_states())
        assert ckpt.failed_saves == 1
    print("stopped", flush=True)
    return 7


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
