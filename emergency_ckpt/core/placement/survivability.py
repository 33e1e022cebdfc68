"""Probability that the RAM tier survives the loss of hosts, for each placement. Exact, in integers.

A job of n slices with H hosts each loses k of its hosts, every set of k equally likely, and their
RAM with them. Hosts of one position (one of each slice) hold copies of the same shards, so the tier
is lost when, at some position, the hosts that failed include all that hold some shard. With a_j
sets of j slices that include no such *block*, the sets of k hosts that do no harm are the
coefficient of x^k in (sum_j a_j x^j)^H.

A state with fewer shards than a position has blocks survives a little more often; a shard that is
stored by more than one host of a slice, likewise. Host states have copies of their own.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

from emergency_ckpt.core.placement.placement_policies import (
    AllButPrimary,
    PlacementPolicy,
    Topology,
)
from emergency_ckpt.errors import ConfigError

Polynomial = tuple[int, ...]
"""Coefficients, the constant first: the number of sets of each size."""


def loss_probability(
    policy: PlacementPolicy, slices: int, hosts_per_slice: int, lost_hosts: int
) -> float:
    """Return the probability that a shard has no copy in RAM after ``lost_hosts`` hosts are lost.

    Raises:
      ConfigError: no slices or hosts, or more lost than there are.
    """
    _check(slices, hosts_per_slice, lost_hosts)
    harmless = _minus(_binomials(slices), _fatal_sets(policy, slices))
    return _lost(harmless, slices, hosts_per_slice, lost_hosts)


def slices_that_may_fail(policy: PlacementPolicy, slices: int) -> int:
    """Return the number of slices, in any combination, that the RAM tier can lose."""
    fatal = _fatal_sets(policy, slices)
    return next(size for size, count in enumerate(fatal) if count) - 1


def _check(slices: int, hosts_per_slice: int, lost_hosts: int) -> None:
    hosts = slices * hosts_per_slice
    if slices < 1 or hosts_per_slice < 1 or not 0 <= lost_hosts <= hosts:
        raise ConfigError(
            [f"{lost_hosts} hosts cannot be lost of {slices} slices of {hosts_per_slice}"],
            target="the plan",
        )


def _lost(harmless: Polynomial, slices: int, hosts_per_slice: int, lost_hosts: int) -> float:
    sets = comb(slices * hosts_per_slice, lost_hosts)
    survived = _coefficient(_power(harmless, hosts_per_slice, lost_hosts), lost_hosts)
    return (sets - survived) / sets


def _fatal_sets(policy: PlacementPolicy, slices: int) -> Polynomial:
    """Return, by size, the number of sets of slices that hold every copy of a shard."""
    if not isinstance(policy, AllButPrimary):
        return _including(slices, min(policy.copies, slices))
    if slices <= 2:
        return _including(slices, slices)
    # A set is fatal with all slices but the primary, with the primary or without it.
    assert Topology.primary_slice == 0
    return _product(_including(slices - 1, slices - 1), (1, 1))


@lru_cache(maxsize=1024)
def _including(slices: int, copies: int) -> Polynomial:
    """Return the number of sets that include one of ``striping.blocks(range(slices), copies)``."""
    if slices == copies:
        return (0,) * slices + (1,)
    if slices < 2 * copies:
        # A block's complement is a block here: a set includes one if its complement is within one.
        return _within(slices, slices - copies)[::-1]
    group, rest = _including(copies, copies), _including(slices - copies, copies)
    neither = _product(_minus(_binomials(copies), group), _minus(_binomials(slices - copies), rest))
    return _minus(_binomials(slices), neither)


@lru_cache(maxsize=1024)
def _within(slices: int, copies: int) -> Polynomial:
    """Return the number of sets that are part of one of the blocks."""
    if slices == copies:
        return _binomials(slices)
    if slices < 2 * copies:
        return _including(slices, slices - copies)[::-1]
    group, rest = _within(copies, copies), _within(slices - copies, copies)
    padded = group + (0,) * (slices + 1 - len(group))
    rest += (0,) * (slices + 1 - len(rest))
    # The empty set is counted in both.
    return tuple(a + b - (size == 0) for size, (a, b) in enumerate(zip(padded, rest, strict=True)))


def _binomials(size: int) -> Polynomial:
    return tuple(comb(size, chosen) for chosen in range(size + 1))


def _minus(a: Polynomial, b: Polynomial) -> Polynomial:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    result = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            result[i + j] += x * y
    return tuple(result)


def _power(base: Polynomial, exponent: int, most: int) -> Polynomial:
    """Return ``base`` to the power, up to x^``most``; the constant of ``base`` is 1.

    By J. C. P. Miller's recurrence (Knuth, TAOCP volume 2, section 4.7), which needs ``most`` times
    the degree multiplications by small numbers, and divides without remainder.
    """
    assert base[0] == 1, "the empty set is counted once"
    result = [1]
    for k in range(1, min(most, exponent * (len(base) - 1)) + 1):
        total = sum(
            (i * exponent - (k - i)) * base[i] * result[k - i]
            for i in range(1, min(k, len(base) - 1) + 1)
        )
        result.append(total // k)
    return tuple(result)


def _coefficient(polynomial: Polynomial, size: int) -> int:
    return polynomial[size] if size < len(polynomial) else 0
