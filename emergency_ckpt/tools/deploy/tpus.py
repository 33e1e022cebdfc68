"""TPU slices of GKE: machine types, and the hosts of a topology."""

from __future__ import annotations

import math
import re

ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""Value of the node label ``cloud.google.com/gke-tpu-accelerator`` for each type."""

MACHINES = {
    "v4": {"ct4p-hightpu-4t": 4},
    "v5e": {"ct5lp-hightpu-4t": 4, "ct5lp-hightpu-1t": 1, "ct5lp-hightpu-8t": 8},
    "v5p": {"ct5p-hightpu-4t": 4},
    "v6e": {"ct6e-standard-4t": 4, "ct6e-standard-1t": 1, "ct6e-standard-8t": 8},
    "tpu7x": {"tpu7x-standard-4t": 4},
}
"""Chips of a host by machine type, for each TPU type; the first one is the default. A machine of 1
or 8 chips is a slice by itself."""

_CHIPS_OF_A_SHARED_SLICE = 4
_FLAT = ("v5e", "v6e")
"""The types whose topologies have two dimensions; those of the others have three."""
_TOPOLOGY = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}", re.ASCII)


def devices_per_chip(tpu_type: str) -> int:
    """Return the JAX devices of a chip: tpu7x shows each of its two cores as one."""
    return 2 if tpu_type == "tpu7x" else 1


def tpu_problems(tpu_type: str, machine_type: str | None, topology: str, hosts: int) -> list[str]:
    """Return the fault of a slice of ``hosts`` hosts; empty without one.

    A topology of the right number of dimensions may be one that nobody sells: the plan has no list
    of those that are sold, and the pods of such a slice wait for nodes.

    Args:
      machine_type: None for the default one of ``tpu_type``.
    """
    machines = MACHINES.get(tpu_type)
    if machines is None:
        return [f"--tpu-type must be one of {', '.join(MACHINES)}, not {tpu_type!r}"]
    name = machine_type or next(iter(machines))
    if name not in machines:
        return [
            f"--machine-type {name!r} is no machine with {tpu_type} chips: {', '.join(machines)}"
        ]
    example = "2x4" if tpu_type in _FLAT else "2x2x4"
    if not _TOPOLOGY.fullmatch(topology) or topology.count("x") != example.count("x"):
        return [f"--topology {topology!r} is no topology of {tpu_type}, such as {example}"]
    chips, chips_of_host = math.prod(map(int, topology.split("x"))), machines[name]
    is_alone = chips_of_host != _CHIPS_OF_A_SHARED_SLICE
    if chips % chips_of_host or (is_alone and chips != chips_of_host):
        alone = ", which are a slice by themselves" if is_alone else ""
        return [f"--topology {topology} has {chips} chips, and {name} has {chips_of_host}{alone}"]
    there = chips // chips_of_host
    if hosts == there:
        return []
    than = "more" if hosts > there else "fewer"
    return [
        f"--hosts {hosts} is {than} than the topology has: {topology} of {tpu_type} has {there}"
        f" hosts of {chips_of_host} chips, and each of them runs one process"
    ]
