"""TPU slices of GKE: the names of their nodes, and the number of hosts of a topology."""

from __future__ import annotations

import math
import re

ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}
"""Value of the node label ``cloud.google.com/gke-tpu-accelerator`` for each type."""

CHIPS_PER_HOST = 4
"""Of the machine types in multi-host node pools: ct4p-hightpu-4t, ct5lp-hightpu-4t, ct5p-hightpu-4t
and ct6e-standard-4t."""

_DIMENSIONS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}
_TOPOLOGY = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}")


def tpu_problems(tpu_type: str, topology: str, hosts: int) -> list[str]:
    """Return the faults of a slice of ``hosts`` hosts, one line each."""
    if tpu_type not in ACCELERATORS:
        return [f"--tpu-type must be one of {', '.join(ACCELERATORS)}, not {tpu_type!r}"]
    wanted = _DIMENSIONS[tpu_type]
    if not _TOPOLOGY.fullmatch(topology) or topology.count("x") + 1 != wanted:
        example = "x".join(["4"] * wanted)
        return [f"--topology of {tpu_type} must be like {example}, not {topology!r}"]
    chips = math.prod(int(side) for side in topology.split("x"))
    if chips % CHIPS_PER_HOST:
        return [f"--topology {topology} has {chips} chips, which are not hosts of {CHIPS_PER_HOST}"]
    there = chips // CHIPS_PER_HOST
    if hosts != there:
        than = "more" if hosts > there else "fewer"
        return [
            f"--hosts {hosts} is {than} than the topology has: {topology} of {tpu_type} has"
            f" {there} hosts of {CHIPS_PER_HOST} chips, and each of them runs one process"
        ]
    return []
