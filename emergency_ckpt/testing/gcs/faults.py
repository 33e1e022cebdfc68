"""Faults on request: which requests they hit, and what happens to those.

The fault model. A rule picks requests by method, path, operation and target, lets the first
``skip`` of them pass, and then hits ``count`` of them. Before the request is applied: ``status``,
``reset`` without ``after_bytes``, and the wait of ``delay``. After it was applied, so that the
client does not learn of it: ``lose_reply``, ``reset`` with ``after_bytes``, ``truncate``,
``trickle``. A trickling request is also read slowly, until it ends or the rule is taken back.
Pure: the server acts on what is decided here.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import msgspec

from emergency_ckpt.testing.gcs.resources import GcsError

FaultKind = Literal["status", "delay", "reset", "truncate", "trickle", "lose_reply"]

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]
_Pattern = Annotated[str, msgspec.Meta(max_length=2048)]


class FaultRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule: ``FaultRule(kind="status", status_code=503, method="GET", target="b/ckpt/*")``.

    All of the given patterns must match. Globs are those of ``fnmatch`` (``*`` also matches ``/``).

    Attributes:
      kind: what happens.
      method: glob over the HTTP method.
      path: glob over the decoded path with its query, ``/storage/v1/b/x/o/y?alt=media``.
      path_regex: the same as a regular expression, searched for; None matches all.
      operation: glob over what the request does, see ``routes.py``: ``objects.media`` (bytes of an
        object), ``objects.get``, ``objects.insert``, ``objects.list``, ``uploads.*``, ...
      target: glob over ``bucket/object``, whether the name was in the path, the query, the body
        or an upload session; ``bucket/`` for requests about a bucket.
      skip: how many matching requests pass first.
      count: how many are hit after that; None for all.
      delay_s: seconds to wait before anything else, for every kind.
      status_code: HTTP status of ``status``.
      retry_after_s: ``Retry-After`` header of ``status``.
      after_bytes: body bytes that get through before ``reset`` or ``truncate``. A reply that has
        no more than that is left whole.
      bytes_per_s: speed of ``trickle``, for the request's body and the reply's. A request that is
        under way when the rule is removed goes on at full speed.
    """

    kind: FaultKind
    method: _Pattern = "*"
    path: _Pattern = "*"
    path_regex: _Pattern | None = None
    operation: _Pattern = "*"
    target: _Pattern = "*"
    skip: _Count = 0
    count: _Count | None = None
    delay_s: _Seconds = 0.0
    status_code: Annotated[int, msgspec.Meta(ge=400, le=599)] = 503
    retry_after_s: _Seconds | None = None
    after_bytes: _Count | None = None
    bytes_per_s: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 1 << 20

    def matches(self, method: str, path: str, operation: str, target: str) -> bool:
        return (
            fnmatchcase(method, self.method)
            and fnmatchcase(path, self.path)
            and fnmatchcase(operation, self.operation)
            and fnmatchcase(target, self.target)
            and (self.path_regex is None or re.search(self.path_regex, path) is not None)
        )


class FaultState(msgspec.Struct, frozen=True, kw_only=True):
    """A rule in force: its id, and how many requests it has matched and hit so far."""

    rule_id: int
    rule: FaultRule
    matched: int = 0
    hit: int = 0


class FaultPlan:
    """The rules of a server in the order they were added."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: dict[int, FaultState] = {}
        self._next_id = 1

    def add(self, rule: FaultRule) -> int:
        """Returns the rule's id. Raises GcsError 400 for a bad pattern, 507 when full."""
        if len(self._states) >= self._limit:
            raise GcsError(507, "limit", f"The fake takes {self._limit} fault rules at most.")
        try:
            re.compile(rule.path_regex or "")
        except re.error as error:
            raise GcsError(400, "invalid", f"Bad path_regex: {error}.") from error
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
        """Whether ``rule``, as ``pick`` returned it, has not been removed since."""
        return any(state.rule is rule for state in self._states.values())

    def pick(self, method: str, path: str, operation: str, target: str) -> FaultRule | None:
        """The rule that hits this request, the first in order; counts it.

        A rule that lets the request pass (``skip``) or is used up leaves it to the next one.
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
