"""Restores a step of plain Orbax while a bucket never gives one of its files; see its test."""

from __future__ import annotations

import os
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp
from configs import config_with
from fake_gcs import FaultRule, GcsControl

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import StorageUnreachable

NEVER_S = 600.0
STATUS = 7

with ocp.CheckpointManager("gs://bucket/run") as plain:
    plain.save(3, args=ocp.args.StandardSave({"w": jnp.arange(8.0)}))
rule = FaultRule(kind="delay", delay_s=NEVER_S, method="GET", target=sys.argv[2])
GcsControl(os.environ["STORAGE_EMULATOR_HOST"]).add_fault(rule)
settings = {
    "dir": "gs://bucket/run",
    "local_dir": sys.argv[1],
    "local_save_every": 0,
    "save_every": 0,
    "start_timeout_s": 120.0,
    "stall_timeout_s": 5.0,
}
with EmergencyCheckpointer(config_with(settings)) as ckpt:
    try:
        ckpt.restore(state={"w": jnp.zeros(8)})
    except StorageUnreachable as error:
        print(error)
sys.exit(STATUS)
