"""Sizes of a job, cost and survival of each placement, and a recommendation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, comb

from emergency_ckpt.core.limits import MAX_LOST_HOSTS, MAX_SLICES
from emergency_ckpt.core.placement import (
    ALL_BUT_PRIMARY,
    AllButPrimary,
    PlacementPolicy,
)
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extras.striped import Striped
from emergency_ckpt.ram.slot_choice import slots_for

Polynomial = list[int]
"""Coefficients, the constant first: the number of sets of each size."""


def loss_probabilities(
    policy: PlacementPolicy, slices: int, hosts_per_slice: int, most_lost_hosts: int
) -> list[float]:
    """Return the probabilities that a shard has no copy in RAM after the loss of 0, 1, ... hosts.

    A job of n slices with H hosts each loses k of its hosts, every set of k equally likely, and
    their RAM with them. Hosts of one position (one of each slice) hold copies of the same shards,
    so the tier is lost when, at some position, the hosts that failed include all that hold some
    shard. With a_j sets of j slices that do no harm, the sets of k hosts that do no harm are the
    coefficient of x^k in (sum_j a_j x^j)^H.

    Exact, in integers, where the copies divide the slices. Otherwise the last group of slices has
    more slices than copies, and the loss of any so many of them is counted as fatal.

    Raises:
      ConfigError: no slices or hosts, or more lost than there are.
    """
    hosts, most = slices * hosts_per_slice, most_lost_hosts
    if slices < 1 or hosts_per_slice < 1 or not 0 <= most <= hosts:
        raise ConfigError(
            [f"{most} hosts cannot be lost of {slices} slices of {hosts_per_slice}"],
            target="the plan",
        )
    at_one_position = [1]
    for group, copies in _groups(policy, slices):
        harmless = [comb(group, lost) for lost in range(copies)]
        at_one_position = _product(at_one_position, harmless, most)
    at_all_positions = [1]
    square, left = at_one_position, hosts_per_slice
    while left:
        if left % 2:
            at_all_positions = _product(at_all_positions, square, most)
        square, left = _product(square, square, most), left // 2
    at_all_positions += [0] * (most + 1 - len(at_all_positions))
    sets = [comb(hosts, lost) for lost in range(most + 1)]
    return [
        (of_all - harmless) / of_all
        for of_all, harmless in zip(sets, at_all_positions, strict=True)
    ]


def slices_that_may_fail(policy: PlacementPolicy, slices: int) -> int:
    """Return the number of slices, in any combination, that the RAM tier can lose."""
    return min(copies for group, copies in _groups(policy, slices) if copies <= group) - 1


def _groups(policy: PlacementPolicy, slices: int) -> list[tuple[int, int]]:
    """Return (slices, copies) of each group of slices that has copies of its own shards.

    The primary slice of the default placement stores nothing: it can fail without harm, which is a
    group of one slice and two copies.
    """
    if policy.copies is None:
        return [(slices, slices)] if slices <= 2 else [(1, 2), (slices - 1, slices - 1)]
    copies = min(policy.copies, slices)
    groups = slices // copies
    return [(copies, copies)] * (groups - 1) + [(slices - copies * (groups - 1), copies)]


def _product(a: Polynomial, b: Polynomial, most: int) -> Polynomial:
    """Return the product up to x^``most``."""
    result = [0] * min(len(a) + len(b) - 1, most + 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b[: max(len(result) - i, 0)]):
            result[i + j] += x * y
    return result


GIB = 1 << 30


@dataclass(frozen=True)
class ProcessRam:
    """The room of one process in its ramdisk, but for small files.

    Attributes:
      slots: for the steps that RAM keeps, and for the save that is being written.
      slot_bytes: of a save, for the process with the most.
      bytes: of the slots, each with the host states of the process and of one of each other slice.
    """

    slots: int
    slot_bytes: int
    bytes: int


def process_ram(
    policy: PlacementPolicy,
    *,
    slices: int,
    hosts_per_slice: int,
    state_bytes: int,
    host_state_bytes: int,
    local_keep_last_n: int,
) -> ProcessRam:
    """Return the room of a process.

    ``state_bytes``: of one replica. ``host_state_bytes``: of one process, encoded.
    """
    slots = slots_for(local_keep_last_n, writes_storage=False)
    slot_bytes = ceil(state_bytes / hosts_per_slice * stored_share(policy, slices))
    return ProcessRam(slots, slot_bytes, slots * (slot_bytes + slices * host_state_bytes))


@dataclass(frozen=True)
class JobShape:
    """A job of equal hosts.

    Attributes:
      state_bytes: of one replica of the state; each host of a slice holds an equal part.
      ramdisk_bytes: of one host; None: unlimited.
      most_lost_hosts: survival is computed for the loss of 1 to this many hosts.
      host_state_bytes: of one host, encoded; one host of every other slice keeps a copy.
      local_keep_last_n: complete steps that RAM keeps.

    Raises:
      ConfigError: lists every fault.
    """

    slices: int
    hosts_per_slice: int
    state_bytes: int
    ramdisk_bytes: int | None
    most_lost_hosts: int = 4
    host_state_bytes: int = 0
    local_keep_last_n: int = 1

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not 1 <= self.slices <= MAX_SLICES:
            problems.append(f"slices must be 1 to {MAX_SLICES}, not {self.slices}")
        if self.hosts_per_slice < 1:
            problems.append(f"hosts per slice must be at least 1, not {self.hosts_per_slice}")
        if self.local_keep_last_n < 1:
            problems.append(f"kept steps must be at least 1, not {self.local_keep_last_n}")
        if not 1 <= self.most_lost_hosts <= MAX_LOST_HOSTS:
            problems.append(f"lost hosts must be 1 to {MAX_LOST_HOSTS}, not {self.most_lost_hosts}")
        if problems:
            raise ConfigError(problems, target="the plan")

    @property
    def host_bytes(self) -> float:
        """A host's part of the state."""
        return self.state_bytes / self.hosts_per_slice


@dataclass(frozen=True)
class PlacementCosts:
    """Costs of one placement, for the host with the highest.

    Attributes:
      stored_bytes: of one save, which leave the devices.
      ram_bytes: RAM that the slots take, and the host states of as many saves. A host that writes
        to storage takes a slot more, if there is room.
      fetch_bytes: bytes that a host fetches when nothing is lost.
      survival: probability that it survives the loss of 1, 2, ... random hosts.
      slices_that_may_fail: number of slices that may fail at once, in any combination.
    """

    name: str
    stored_bytes: float
    ram_bytes: float
    fetch_bytes: float
    survival: tuple[float, ...]
    slices_that_may_fail: int


def study(job: JobShape) -> list[PlacementCosts]:
    """Return the costs of the default and of ``striped(r)`` for r from 1 to the number of slices.

    One slice keeps one copy whatever the placement: the default alone.
    """
    if job.slices == 1:
        return [_costs(job, ALL_BUT_PRIMARY, AllButPrimary())]
    rows = [_costs(job, f"striped({r})", Striped(r)) for r in range(1, job.slices + 1)]
    return [*rows, _costs(job, ALL_BUT_PRIMARY, AllButPrimary())]


def _costs(job: JobShape, name: str, policy: PlacementPolicy) -> PlacementCosts:
    part, slices = job.host_bytes, job.slices
    stored = part * stored_share(policy, slices)
    fetched = part - stored
    if policy.copies is None and slices > 2:
        fetched = part  # by the primary, which stores nothing
    needed = process_ram(
        policy,
        slices=slices,
        hosts_per_slice=job.hosts_per_slice,
        state_bytes=job.state_bytes,
        host_state_bytes=job.host_state_bytes,
        local_keep_last_n=job.local_keep_last_n,
    )
    most_lost_hosts = min(job.most_lost_hosts, slices * job.hosts_per_slice)
    losses = loss_probabilities(policy, slices, job.hosts_per_slice, most_lost_hosts)
    return PlacementCosts(
        name=name,
        stored_bytes=stored,
        ram_bytes=needed.bytes,
        fetch_bytes=fetched,
        survival=tuple(1 - loss for loss in losses[1:]),
        slices_that_may_fail=slices_that_may_fail(policy, slices),
    )


def stored_share(policy: PlacementPolicy, slices: int) -> float:
    """Return how much of its part of the state a host stores, 0 to 1, the host with the most."""
    return min(policy.copies, slices) / slices if isinstance(policy, Striped) else 1.0


def recommend(
    job: JobShape, rows: Sequence[PlacementCosts], *, wanted_survival: float
) -> tuple[PlacementCosts, str]:
    """Return the safe placement with the fewest bytes, and the reason.

    Safe: the RAM tier survives the loss of any slice, and of
    ``most_lost_hosts`` random hosts with ``wanted_survival``. If no safe placement fits the
    ramdisk, the safest that fits, or the smallest.
    """
    by_size = sorted(rows, key=lambda row: (row.stored_bytes, row.fetch_bytes))
    fitting = [
        row for row in by_size if job.ramdisk_bytes is None or row.ram_bytes <= job.ramdisk_bytes
    ]
    if not fitting:
        return by_size[0], "none fits the ramdisk; this one is the smallest: enlarge the ramdisk"
    if job.slices == 1:
        return fitting[0], (
            "one slice has no second copy: RAM survives the end of the processes and no lost host;"
            " rely on the persistent tier for the rest"
        )
    hosts = f"{len(rows[0].survival)} random hosts"
    for row in fitting:
        if row.slices_that_may_fail > 0 and row.survival[-1] >= wanted_survival:
            return row, (
                f"fewest bytes that survive any lost slice and, in {row.survival[-1]:.4%} of the"
                f" cases, {hosts}"
            )
    best = max(fitting, key=lambda row: (row.slices_that_may_fail > 0, row.survival[-1]))
    return best, (
        f"the safest that fits; it survives the loss of {hosts} in {best.survival[-1]:.4%} of the"
        f" cases, less than the {wanted_survival:.4%} wanted: rely on the persistent tier too"
    )
