"""Starts and restores where a bucket never answers; prints the end, and the events of both."""

from __future__ import annotations

import logging
import sys

import numpy as np
from configs import config_with

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.errors import PersistentTierError

logging.basicConfig(level=logging.INFO)
points: list[str] = []
settings = {
    "dir": "gs://bucket/run",
    "local_dir": sys.argv[1],
    "start_timeout_s": 8,
    "on_event": lambda event: points.append(event.point),
}
with EmergencyCheckpointer(config_with(settings)) as ckpt:
    started, points[:] = list(points), []
    try:
        ckpt.restore(state={"w": np.zeros(3)})
    except PersistentTierError as error:
        print("error", error)
    print("start", *started)
    print("restore", *points)
