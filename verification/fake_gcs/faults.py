"""The fault rules of a server: the choice of requests, and the faults. Pure.

A rule selects requests by method, path, operation and target, lets the first ``skip`` of them pass,
and then hits ``count`` of them. Before the request is applied: ``status``, ``reset`` without
``after_bytes``, the wait of ``delay``, and that of ``hold``, which lasts until the rule is taken
back. After it was applied, so that the client does not learn of it: ``lose_reply``, ``reset`` with
``after_bytes``, ``truncate``, ``flip``, ``trickle``, ``throttle``. A trickling or throttled request
is also read slowly, until it ends or the rule is taken back: each at the speed of a trickle, all
together at that of a throttle. The server acts on what is decided here.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from fake_gcs.resources import GcsError

FaultKind = Literal[
    "status", "delay", "hold", "reset", "truncate", "flip", "trickle", "throttle", "lose_reply"
]

_BEHIND_S = 0.25
"""Time that a throttle makes up for. A loaded machine wakes the server late, which would else lower
the rate, and of few uploads more than of many."""


class FaultRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule: ``FaultRule(kind="status", status_code=503, method="GET", target="b/ckpt/*")``.

    All of the given patterns must match. Globs are those of ``fnmatch`` (``*`` also matches ``/``).

    Attributes:
      kind: the fault. ``flip``: one bit in the middle of the reply is another; the object keeps its
        bytes.
      method: glob over the HTTP method.
      path: glob over the decoded path with its query, ``/storage/v1/b/x/o/y?alt=media``.
      operation: glob over the request's operation (``routes.py``): ``objects.media`` (bytes of an
        object), ``objects.get``, ``objects.insert``, ``objects.list``, ``uploads.*``, ...
      target: glob over ``bucket/object``, with the name from the path, the query, the body or an
        upload session; ``bucket/`` for requests about a bucket.
      skip: number of matching requests that pass first.
      count: number of requests that are hit after that; None for all.
      delay_s: seconds to wait first, for every kind.
      status_code: HTTP status of ``status``.
      after_bytes: body bytes sent before ``reset`` or ``truncate``. A shorter reply stays whole.
      bytes_per_s: speed of each request that trickles, and of all together that are throttled, for
        their bodies and their replies'. When the rule is removed, requests in progress continue at
        full speed.
    """

    kind: FaultKind
    method: str = "*"
    path: str = "*"
    operation: str = "*"
    target: str = "*"
    skip: int = 0
    count: int | None = None
    delay_s: float = 0.0
    status_code: int = 503
    after_bytes: int | None = None
    bytes_per_s: int = 1 << 20

    @property
    def is_slow(self) -> bool:
        """Return True when the bytes of a request that is hit have a limited speed."""
        return self.kind in ("trickle", "throttle")

    def matches(self, method: str, path: str, operation: str, target: str) -> bool:
        return (
            fnmatchcase(method, self.method)
            and fnmatchcase(path, self.path)
            and fnmatchcase(operation, self.operation)
            and fnmatchcase(target, self.target)
        )


class Throttles:
    """The speed that all requests under a rule share."""

    def __init__(self) -> None:
        # With the rule, so that its id stays its own.
        self._until_s: dict[int, tuple[FaultRule, float]] = {}

    def wait_s(self, rule: FaultRule, count: int, now_s: float) -> float:
        """Return how many seconds from now the next ``count`` bytes under ``rule`` take to pass."""
        _, until_s = self._until_s.get(id(rule), (rule, now_s))
        until_s = max(now_s - _BEHIND_S, until_s) + count / rule.bytes_per_s
        self._until_s[id(rule)] = rule, until_s
        return max(0.0, until_s - now_s)


class FaultState(msgspec.Struct, frozen=True, kw_only=True):
    """An active rule: its id, and the number of requests that it has matched and hit."""

    rule_id: int
    rule: FaultRule
    matched: int = 0
    hit: int = 0


class FaultPlan:
    """The rules of a server in the order of their addition."""

    def __init__(self) -> None:
        self._states: dict[int, FaultState] = {}
        self._next_id = 1

    def add(self, rule: FaultRule) -> int:
        """Add a rule and return its id."""
        rule_id = self._next_id
        self._next_id += 1
        self._states[rule_id] = FaultState(rule_id=rule_id, rule=rule)
        return rule_id

    def remove(self, rule_id: int) -> None:
        if self._states.pop(rule_id, None) is None:
            raise GcsError(404, "notFound", f"No fault rule {rule_id}.")

    def clear(self) -> None:
        self._states.clear()

    def states(self) -> list[FaultState]:
        return list(self._states.values())

    def in_force(self, rule: FaultRule) -> bool:
        """Return True when ``rule``, as returned by ``pick``, has not been removed."""
        return any(state.rule is rule for state in self._states.values())

    def pick(self, method: str, path: str, operation: str, target: str) -> FaultRule | None:
        """Return the first rule that hits this request, or None, and count the hit.

        If a rule lets the request pass (``skip``) or is used up, the next rule is tried.
        """
        for state in self._states.values():
            rule = state.rule
            if rule.count is not None and state.hit >= rule.count:
                continue
            if not rule.matches(method, path, operation, target):
                continue
            hits = state.matched >= rule.skip
            self._states[state.rule_id] = msgspec.structs.replace(
                state, matched=state.matched + 1, hit=state.hit + hits
            )
            if hits:
                return rule
        return None
