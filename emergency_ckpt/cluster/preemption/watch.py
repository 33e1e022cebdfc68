"""Preemption notices: the step at which all processes act on one, and the time that is left.

SIGTERM is JAX's, where its service is on; every other notice, and SIGTERM where it is off, is
agreed on in ``notice_agreement``, by the same rule.

JAX's sync manager takes SIGTERM at any process and agrees, in the background, on the next call
that all processes make. It identifies calls by number and answers yes once, at the number after the
highest that any process had used. So the numbers must rise by one with each step and be equal on
all processes. Steps do not qualify: they jump at a restore, and a notice in between would wait for
a step that never comes. The numbers here continue from the highest that any process has used,
agreed at each start and restore (``go_on_from``).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Protocol

from absl import logging
from jax.experimental import multihost_utils

from emergency_ckpt.cluster.coordination import Coordinator, jax_hears_notices
from emergency_ckpt.cluster.preemption.notice_agreement import AgreedNotices, SignalNotices
from emergency_ckpt.cluster.preemption.sources import NoticePolls, NoticeSource
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.events import EventSink

PREEMPTED_EXIT_CODE = 128 + signal.SIGTERM
"""Exit status after ``exit_on_preemption``; a supervisor treats it as a death and restarts."""
_GOOD_ENDS = (None, 0, PREEMPTED_EXIT_CODE)


def is_good_end(error: BaseException | None) -> bool:
    """Return whether a ``with`` block that ``error`` ends has come to its end as intended."""
    return error is None or (isinstance(error, SystemExit) and error.code in _GOOD_ENDS)


class Notices(Protocol):
    """A source of notices. ``last_number``: the highest number that this process has used."""

    @property
    def source(self) -> str: ...
    @property
    def last_number(self) -> int: ...

    def reached(self, number: int) -> bool:
        """Return True, once, when all processes act on a notice at their call with ``number``."""
        ...

    def notice(self) -> None:
        """Have all processes act at one of their next calls. Returns at once; any thread."""
        ...

    def close(self) -> None:
        """Restore the signal handlers that were set before."""
        ...


class JaxNotices:
    """JAX's sync manager, which ``jax.distributed.initialize`` starts. About 13 us per call.

    There is one per process, so its numbers are shared by all checkpointers.
    """

    source = "jax"
    last_number = 0

    def reached(self, number: int) -> bool:
        JaxNotices.last_number = number
        return multihost_utils.reached_preemption_sync_point(number)


class JaxAndOwnNotices:
    """SIGTERM by JAX's service, and all other notices agreed through our own keys.

    Each says yes at one number, equal on all processes, so all act at the lower of the two.
    """

    source = "jax"

    def __init__(self, own: SignalNotices | AgreedNotices) -> None:
        """``own``: takes no signal."""
        self._jax = JaxNotices()
        self._own = own

    @property
    def last_number(self) -> int:
        return max(self._jax.last_number, self._own.last_number)

    def reached(self, number: int) -> bool:
        return self._jax.reached(number) or self._own.reached(number)

    def notice(self) -> None:
        self._own.notice()

    def close(self) -> None:
        self._own.close()


def find_notices(coordinator: Coordinator, timeout_s: float) -> Notices:
    """Return the source of notices: SIGTERM is taken by JAX's service, or by us where that is off.

    ``timeout_s``: maximum wait, after a notice, for the numbers of all processes.
    """
    by_jax = jax_hears_notices()
    if coordinator.process_count == 1:
        own: SignalNotices | AgreedNotices = SignalNotices(takes_sigterm=not by_jax)
    else:
        own = AgreedNotices(coordinator, timeout_s, takes_sigterm=not by_jax)
    return JaxAndOwnNotices(own) if by_jax else own


class PreemptionWatch:
    """The preemption state of the job, for the training thread.

    A call costs about 13 us per step and does not block, except right after a notice, while JAX's
    manager or ours determines the sync point.
    """

    def __init__(self, notices: Notices | None, *, grace_s: float) -> None:
        """``grace_s``: time from the sync point to the end. ``notices`` None: none is watched."""
        self._notices = notices
        self._polls: NoticePolls | None = None
        self.source = "" if notices is None else notices.source
        self._grace_s = grace_s
        self._number = 0
        self._asked_at: int | None = None
        self._sync_step: int | None = None
        self._deadline_s = 0.0

    def poll(self, sources: Sequence[NoticeSource], events: EventSink) -> None:
        """Look for notices of ``sources`` in the background, too. Once; not without notices."""
        assert self._notices is not None, "no notice is watched"
        if sources:
            self._polls = NoticePolls(sources, events, self._notices.notice)

    def request(self) -> None:
        """Give notice, as any process may; all act on it. Returns at once; any thread.

        CheckpointError: no notices are watched, or no longer.
        """
        notices = self._notices
        if notices is None:
            hint = "set save_on_preemption; after stop it is too late"
            raise CheckpointError("request", "a preemption save", "no notice is heeded", hint=hint)
        notices.notice()

    @property
    def last_number(self) -> int:
        """The highest number that this process has used."""
        return 0 if self._notices is None else self._notices.last_number

    def go_on_from(self, number: int) -> None:
        """Continue from ``number``, the highest that any process has used: the same call on all."""
        self._number = number
        self._asked_at = None

    @property
    def sync_step(self) -> int | None:
        """The step at which all processes act on the notice; None before it."""
        return self._sync_step

    def reached(self, step: int) -> bool:
        """Return whether ``step`` is the sync point or later. Queries the source once per step."""
        if self._notices is None:
            return False
        if self._sync_step is not None:
            return True
        if step == self._asked_at:
            return False
        self._asked_at = step
        self._number += 1
        if not self._notices.reached(self._number):
            return False
        self._sync_step = step
        self._deadline_s = time.monotonic() + self._grace_s
        logging.warning(
            "preemption notice: all processes act on it at step %d; %g s are left",
            step,
            self._grace_s,
        )
        return True

    def reached_at_end(self) -> bool:
        """Return whether a notice came since the last step, by one more query."""
        step, self._asked_at = self._asked_at, None
        return step is not None and self._sync_step is None and self.reached(step)

    def grace_left_s(self) -> float:
        """Return the seconds left of the grace period, at least 0. Only after the sync point."""
        assert self._sync_step is not None, "no notice was seen"
        return max(0.0, self._deadline_s - time.monotonic())

    def close(self) -> None:
        """Stop watching. Idempotent; call in the thread that made the watch."""
        if self._polls is not None:
            self._polls.close()
        if self._notices is not None:
            self._notices.close()
            self._notices = None
