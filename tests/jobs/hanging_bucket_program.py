"""A training loop that ends by an exception while a bucket answers nothing; see its test."""

from __future__ import annotations

import os
import sys
import time

import jax.numpy as jnp
from fake_gcs import FaultRule, GcsControl

from emergency_ckpt import EmergencyCheckpointer

NEVER_S = 600.0
WAIT_S = 60.0


def main(target: str, local_dir: str, exit_timeout_s: float) -> None:
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    state = {"x": jnp.arange(1000.0)}
    with EmergencyCheckpointer(
        dir="gs://bucket/run",
        local_dir=local_dir,
        local_save_every=0,
        save_every=1,
        save_timeout_s=4 * exit_timeout_s,
    ) as ckpt:
        ckpt.restore(state=state)
        rule = control.add_fault(
            FaultRule(kind="delay", delay_s=NEVER_S, method="POST", target=f"bucket/run/{target}")
        )
        ckpt.save(step=5, state=state)
        deadline_s = time.monotonic() + WAIT_S
        while not any(each.rule_id == rule and each.hit for each in control.fault_states()):
            assert time.monotonic() < deadline_s, f"nothing was written to {target}"
            time.sleep(0.01)
        raise KeyError("a bug")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
