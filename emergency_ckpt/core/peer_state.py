"""The decision by signs of the network: a process is there, it is absent, or it has died. Pure."""

from __future__ import annotations

import dataclasses
from typing import Literal

SILENCE_S = 10.0
"""Silence of a host for this long is a sign; less may be one lost packet and its repetition."""


@dataclasses.dataclass(frozen=True)
class Signs:
    """Signs that one process has of another, since that answered last.

    Attributes:
      closed: a connection to it was closed from its side.
      refused: its host refuses connections to its port.
      silent_s: seconds for which its host has answered nothing; None while it answers.
      said: the sentence of a process that found it dead; empty without one.
    """

    closed: bool = False
    refused: bool = False
    silent_s: float | None = None
    said: str = ""


@dataclasses.dataclass(frozen=True)
class PeerState:
    """The decision on one process.

    ``absent``: waits for it end; it may come back. ``dead``: it never does. ``reason``: what was
    seen, in words; empty of one that is present.
    """

    kind: Literal["present", "absent", "dead"]
    reason: str = ""


PRESENT = PeerState("present")


def decide(signs: Signs) -> PeerState:
    """Decide on one process.

    Only a kernel that has lost the process both closes its connections and refuses new ones, and
    that takes seconds. A partition looks like a host that is gone: neither closes nor refuses
    anything. So silence ends waits, and never the job: JAX's heartbeats tell a lost host from a
    partition that heals. One sign alone, but silence of ``SILENCE_S``, ends no wait for arrays;
    a server may have closed an idle connection.
    """
    if signs.said:
        return PeerState("dead", signs.said)
    if signs.refused and signs.closed:
        reason = "its connections were closed, and its host refuses new ones to its port"
        return PeerState("dead", reason)
    if signs.refused:
        return PeerState("absent", "its host refuses connections to its port")
    if signs.silent_s is not None and (signs.closed or signs.silent_s >= SILENCE_S):
        return PeerState("absent", f"its host has not answered for {signs.silent_s:.0f} s")
    return PRESENT
