"""A training loop that ends while a bucket answers nothing; see its test.

``raise``: by an exception, while the save waits. ``return``: with status 7, after the save was
given up.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from configs import config_with
from fake_gcs import FaultRule, GcsControl

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import SaveFailed

NEVER_S = 600.0
WAIT_S = 120.0


def raises(ckpt: EmergencyCheckpointer, was_hit: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not was_hit():
        assert time.monotonic() < deadline_s, "nothing was written there"
        time.sleep(0.01)
    raise KeyError("a bug")


def returns(ckpt: EmergencyCheckpointer, was_hit: Callable[[], bool]) -> None:
    ckpt.wait_until_finished(WAIT_S)
    try:
        ckpt.check_for_errors()
    except SaveFailed as error:
        print(error)
    assert was_hit()
    assert ckpt.failed_saves == 1


def main(end: str, target: str, local_dir: str, exit_timeout_s: float) -> int:
    control = GcsControl(os.environ["STORAGE_EMULATOR_HOST"])
    state = {"x": jnp.arange(1000.0)}
    settings: dict[str, Any] = {
        "dir": "gs://bucket/run",
        "local_dir": local_dir,
        "local_save_every": 0,
        "save_every": 1,
        "save_timeout_s": 4 * exit_timeout_s,
    }
    if end == "return":  # it is also the time that storage has for an answer
        settings["total_timeout_s"] = 20.0
    with EmergencyCheckpointer(config_with(settings)) as ckpt:
        ckpt.restore(state=state)
        rule = control.add_fault(
            FaultRule(kind="delay", delay_s=NEVER_S, method="POST", target=f"bucket/run/{target}")
        )
        ckpt.save(step=5, state=state)
        work = {"raise": raises, "return": returns}[end]
        work(ckpt, lambda: any(f.rule_id == rule and f.hit for f in control.fault_states()))
    print("stopped", flush=True)
    return 7


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4], float(sys.argv[4])))
