"""The drain of a job that is over for good, by the servers of its hosts themselves.

No engine is asked whether a job will be started again. Two signs stand for its end:

- No process of the run has been on this host, and none answers elsewhere, for so long
  (``LastDrain.poll``). A job that starts again later loses nothing: the drained step is an ordinary
  one in storage.
- This host is about to be given back (``LastDrain.at_end``): what its RAM has is lost in any case.

One server drains, and the others serve it (``turn_at_the_end``).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import Literal, TypeVar

from emergency_ckpt.background import SignalFlag
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.ram.locks import current_holder, process_directories
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.pool import NotConnected, numeric_addresses

Turn = Literal["drain", "wait", "leave"]
_T = TypeVar("_T")

_ANSWER_S = 5.0
_NAMES_S = 60.0
"""For so long the end of a host waits for the addresses of those that serve its drain."""
_ASK_EVERY_S = 2.0
_LOOK_EVERY_S = 0.5
_THREADS = 32
_LOOKS = 4
"""Looks whether trainers answer, in the time after which a drain begins. Each look asks all
trainers, so that many looks would disturb a large job that runs."""

CANDIDATES = 2
"""The second one is there for the case that the first one dies. More would only repeat the look at
storage, one after the other, while their hosts are to be given back."""


def candidates_of(own: str, answering: Collection[str]) -> tuple[str, ...]:
    """Return the addresses whose servers may drain, in their order, of all that answer now."""
    return tuple(sorted({own, *answering})[:CANDIDATES])


def turn_at_the_end(own: str, candidates: tuple[str, ...], answering: Collection[str]) -> Turn:
    """Return what a server does whose host is about to be given back.

    All servers go on serving until the candidates have left: those need what the others have.

    Args:
      candidates: as of when the end began; the same on all hosts that began it together.
      answering: those of ``candidates`` that answer now.
    """
    if own not in candidates:
        return "wait" if answering else "leave"
    before = candidates[: candidates.index(own)]
    return "wait" if any(address in answering for address in before) else "drain"


class LastDrain:
    """Notices the end of a job, and drains. Not thread-safe; use its methods in one thread.

    Args:
      args: the options of ``eckpt serve``.
      own: the address at which this host's server answers its peers.
      say: prints a line, and never raises: a drain is worth more than its lines.
      stopping: ends the looks of ``poll`` when it is set.
      hurrying: ends a drain, and the wait for one, when it is set.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        own: str,
        client: TransferClient,
        say: Callable[[str], None],
        stopping: SignalFlag,
        hurrying: SignalFlag,
    ) -> None:
        self._args = args
        self._own = own
        self._say = say
        self._client = client
        self._stopping = stopping
        self._hurrying = hurrying
        self._idle_since_s: float | None = None
        self._looked_s = 0.0
        self._is_drained = False

    def poll(self, now_s: float, after_s: float) -> None:
        """Drain when no process was there for ``after_s`` seconds; once for each end of the job.

        The trainers of other hosts are asked more often, also after a drain: a trainer that answers
        shows that the job is back, and the end of that job is drained again. Blocks while peers are
        asked, unless the server is told to stop, and while RAM is drained. LocalTierError, OSError
        when the ramdisk cannot be read.
        """
        if self._runs_here():
            self._idle_since_s, self._is_drained = None, False
            return
        if self._idle_since_s is None:
            self._idle_since_s = self._looked_s = now_s
        is_due = not self._is_drained and now_s - self._idle_since_s >= after_s
        if not is_due and now_s - self._looked_s < after_s / _LOOKS:
            return
        self._looked_s = now_s
        runs = self._runs_elsewhere(math.inf, self._stopping)
        if runs:
            self._is_drained = False
            self._idle_since_s = now_s
        if runs or not is_due:
            return
        self._idle_since_s = now_s  # whatever the outcome, the next attempt is that much later
        peers = _result(self._peers, math.inf, self._stopping)
        is_below = runs is not None and peers is not None and self._is_below(peers)
        if self._stopping.is_set():
            return  # nobody may have answered yet
        if runs is None or peers is None:
            self._say("a name of the job cannot be resolved now: the next look is later")
        elif not is_below:
            self._is_drained = self._drain(peers)

    def at_end(self, trainers_end_s: float) -> None:
        """Drain, or serve the servers that drain, until all is done or there is no time. Blocks.

        When processes of the job still answer elsewhere after ``trainers_end_s`` seconds, the job
        goes on without this host, and there is nothing to drain. Where nobody knows that after so
        long, as when the resolver gives no answer, RAM is drained: that harms no job.
        """
        end_s = time.monotonic() + trainers_end_s
        while (runs := self._runs_elsewhere(end_s, self._hurrying)) is not False:
            # The last look begins in time for the answer of a process that is there.
            left_s = end_s - time.monotonic() - _ASK_EVERY_S
            if left_s <= 0 or self._hurrying.wait(min(left_s, _ASK_EVERY_S)):
                break
        if runs:
            self._say("the job runs on other hosts: nothing is drained")
            return
        peers = _result(self._peers, time.monotonic() + _NAMES_S, self._hurrying) or []
        candidates = candidates_of(self._own, self._all_answering(peers))
        others = [address for address in candidates if address != self._own]
        while (turn := self._turn(candidates, others)) == "wait":
            if self._hurrying.wait(_ASK_EVERY_S):
                return
        if turn == "drain":
            self._drain(peers)

    def _turn(self, candidates: tuple[str, ...], others: Sequence[str]) -> Turn:
        return turn_at_the_end(self._own, candidates, self._all_answering(others))

    def _runs_here(self) -> bool:
        for path in process_directories(self._args.local_dir / self._args.run_id):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if current_holder(path, self._args.owner) is not None:
                    return True
        return False

    def _runs_elsewhere(self, end_s: float, flag: SignalFlag) -> bool | None:
        """Return whether a process of the job answers, None where nobody knows that by ``end_s``.

        ``end_s``, ``flag``: as of ``_result``.
        """

        def look() -> bool | None:
            trainers = _addresses(self._args.trainers)
            return None if trainers is None else self._is_any(trainers, end_s, flag)

        return _result(look, end_s, flag)

    def _peers(self) -> list[str] | None:
        """Return the other servers, sorted; None where nobody knows their addresses."""
        addresses = _addresses(self._args.peers)
        return None if addresses is None else sorted(addresses - {self._own})

    def _is_below(self, peers: Sequence[str]) -> bool | None:
        """Return whether a server before this one answers, which then is the one to drain."""
        below = [address for address in peers if address < self._own]
        flag = self._stopping
        return _result(lambda: self._is_any(below, math.inf, flag), math.inf, flag)

    def _all_answering(self, addresses: Collection[str]) -> set[str]:
        flag = self._hurrying
        asked = _result(lambda: {*self._answering(addresses, math.inf, flag)}, math.inf, flag)
        return asked or set()

    def _is_any(self, addresses: Collection[str], end_s: float, flag: SignalFlag) -> bool:
        answering = self._answering(addresses, end_s, flag)
        with contextlib.closing(answering):
            return next(answering, None) is not None

    def _answering(
        self, addresses: Collection[str], end_s: float, flag: SignalFlag
    ) -> Generator[str]:
        """Ask all at once; yield the addresses that answer by ``end_s``, as soon as they do."""
        pool = ThreadPoolExecutor(_THREADS, "eckpt-drain")
        try:
            asked = {pool.submit(self._answers, name, end_s, flag): name for name in addresses}
            for answer in as_completed(asked):
                if answer.result():
                    yield asked[answer]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _answers(self, address: str, end_s: float, flag: SignalFlag) -> bool:
        within_s = min(_ANSWER_S, end_s - time.monotonic())
        if within_s <= 0 or flag.is_set():
            return False
        try:
            self._client.greet(address, within_s)
        except CheckpointError:
            return False
        return True

    def _drain(self, peers: Sequence[str]) -> bool:
        """Drain, in a process of its own, which needs JAX and Orbax; return whether all is saved.

        The secret is in the environment, or in a file. A killed drain leaves no half-written step.
        The process ignores the first signal, which a terminal or an init system sends to it too.
        """
        if self._hurrying.is_set():
            return False
        args = self._args
        command = [
            *("/bin/sh", "-c", "trap '' INT TERM; exec \"$@\"", "sh"),
            *(sys.executable, "-m", "emergency_ckpt.tools.cli.main", "drain"),
            *("--dir", args.drain_to, "--run-id", args.run_id, "--local-dir", str(args.local_dir)),
        ]
        for name, value in (("--secret-file", args.secret_file), ("--owner", args.owner)):
            if value is not None:
                command += [name, str(value)]
        if peers:
            command += ["--peers", ",".join(peers)]
        self._say(f"the job is over: drain to {args.drain_to}")
        with subprocess.Popen(command) as process:
            while process.poll() is None:
                if self._hurrying.wait(_LOOK_EVERY_S):
                    process.kill()
                    self._say("a second signal has ended the drain")
                    return False
        return process.returncode == 0


def _result(work: Callable[[], _T], end_s: float, flag: SignalFlag) -> _T | None:
    """Return the result of ``work``; None at ``end_s``, or once ``flag`` is set.

    ``end_s``: of ``time.monotonic``. Nobody can interrupt a resolver, so ``work`` may go on in its
    thread, for which no exit waits.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="eckpt-look", daemon=True).start()
    # In pieces: the handler of a signal that came just before a wait runs after it.
    while not (outcome.done() or flag.is_set()) and (left_s := end_s - time.monotonic()) > 0:
        wait([outcome], min(left_s, _LOOK_EVERY_S))
    return outcome.result() if outcome.done() else None


def _addresses(names: Iterable[str]) -> set[str] | None:
    try:
        return {address for name in names for address in numeric_addresses(name)}
    except NotConnected:  # the resolver fails
        return None
