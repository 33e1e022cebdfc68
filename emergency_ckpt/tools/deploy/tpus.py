"""TPU slices of GKE: machine types, the chips of a host, and the topologies that can be had."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
"""Value of the node label ``cloud.google.com/gke-tpu-accelerator`` for each type."""


@dataclass(frozen=True)
class Machine:
    """A machine type with TPU chips.

    Attributes:
      tpu_type: one of ``ACCELERATORS``.
      chips: of one host.
      whole_slice: the topology of a machine that is a slice by itself; None: slices have several.
    """

    tpu_type: str
    chips: int
    whole_slice: str | None = None


MACHINES = {
    "ct4p-hightpu-4t": Machine("v4", 4),
    "ct5lp-hightpu-4t": Machine("v5e", 4),
    "ct5lp-hightpu-1t": Machine("v5e", 1, "1x1"),
    "ct5lp-hightpu-8t": Machine("v5e", 8, "2x4"),
    "ct5p-hightpu-4t": Machine("v5p", 4),
    "ct6e-standard-4t": Machine("v6e", 4),
    "ct6e-standard-1t": Machine("v6e", 1, "1x1"),
    "ct6e-standard-8t": Machine("v6e", 8, "2x4"),
    "tpu7x-standard-4t": Machine("tpu7x", 4),
}
"""By name; the first of each type is its default."""

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")  # v5e and v6e
_PARTS_OF_A_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_MOST_CHIPS = {"v4": 4096, "v5p": 8960, "tpu7x": 9216}  # of those with three dimensions
_CUBES = re.compile(r"[1-9][0-9]{0,3}x[1-9][0-9]{0,3}x[1-9][0-9]{0,3}")


def machines_of(tpu_type: str) -> list[str]:
    """Return the machine types of ``tpu_type``, the default one first."""
    return [name for name, machine in MACHINES.items() if machine.tpu_type == tpu_type]


def devices_per_chip(tpu_type: str) -> int:
    """Return the JAX devices of a chip: tpu7x shows each of its two cores as one."""
    return 2 if tpu_type == "tpu7x" else 1


def tpu_problems(tpu_type: str, machine_type: str | None, topology: str, hosts: int) -> list[str]:
    """Return the faults of a slice of ``hosts`` hosts, one line each.

    ``machine_type``: None for the default one of ``tpu_type``.
    """
    if tpu_type not in ACCELERATORS:
        return [f"--tpu-type must be one of {', '.join(ACCELERATORS)}, not {tpu_type!r}"]
    names = machines_of(tpu_type)
    if machine_type not in (None, *names):
        return [
            f"--machine-type {machine_type!r} is no machine with {tpu_type} chips:"
            f" {', '.join(names)}"
        ]
    if not _is_sold(tpu_type, topology):
        return [f"--topology {topology!r} is none of {tpu_type}: {_topologies(tpu_type)}"]
    return _host_problems(machine_type or names[0], topology, hosts)


def _host_problems(name: str, topology: str, hosts: int) -> list[str]:
    machine, chips = MACHINES[name], math.prod(int(side) for side in topology.split("x"))
    if machine.whole_slice not in (None, topology):
        return [f"--machine-type {name} is a slice {machine.whole_slice} by itself, not {topology}"]
    if chips % machine.chips:
        return [
            f"--topology {topology} has {chips} chips, which are not hosts of {machine.chips}"
            f" as {name} has"
        ]
    there = chips // machine.chips
    if hosts == there:
        return []
    than = "more" if hosts > there else "fewer"
    return [
        f"--hosts {hosts} is {than} than the topology has: {topology} of {machine.tpu_type} has"
        f" {there} hosts of {machine.chips} chips, and each of them runs one process"
    ]


def _is_sold(tpu_type: str, topology: str) -> bool:
    most_chips = _MOST_CHIPS.get(tpu_type)
    if most_chips is None:
        return topology in _FLAT
    if topology in _PARTS_OF_A_CUBE or not _CUBES.fullmatch(topology):
        return topology in _PARTS_OF_A_CUBE
    sides = [int(side) for side in topology.split("x")]
    is_in_order = tpu_type == "v4" or sides == sorted(sides)
    return is_in_order and not any(side % 4 for side in sides) and math.prod(sides) <= most_chips


def _topologies(tpu_type: str) -> str:
    if tpu_type not in _MOST_CHIPS:
        return ", ".join(_FLAT)
    order = "" if tpu_type == "v4" else " in rising order"
    return (
        f"{', '.join(_PARTS_OF_A_CUBE)}, or three multiples of 4{order}, such as 4x4x8, with at"
        f" most {_MOST_CHIPS[tpu_type]} chips"
    )
