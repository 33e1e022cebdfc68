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
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from emergency_ckpt.background import SignalFlag
from emergency_ckpt.core.wording import printable
from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.ram.locks import current_holder, process_directories
from emergency_ckpt.transfer.client import TransferClient
from emergency_ckpt.transfer.pool import NotConnected, numeric_addresses

Turn = Literal["drain", "wait", "leave"]

_ANSWER_S = 5.0
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
      hurrying: ends a drain, and the wait for one, when it is set.
    """

    def __init__(
        self, args: argparse.Namespace, own: str, client: TransferClient, hurrying: SignalFlag
    ) -> None:
        self._args = args
        self._own = own
        self._client = client
        self._hurrying = hurrying
        self._idle_since_s: float | None = None
        self._looked_s = 0.0
        self._is_drained = False

    def poll(self, now_s: float, after_s: float) -> None:
        """Drain when no process was there for ``after_s`` seconds; once for each end of the job.

        The trainers of other hosts are asked more often, also after a drain: a trainer that answers
        shows that the job is back, and the end of that job is drained again. Blocks while peers are
        asked, and while RAM is drained. LocalTierError, OSError when the ramdisk cannot be read.
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
        runs = self._runs_elsewhere()
        if runs:
            self._is_drained = False
            self._idle_since_s = now_s
        if runs or not is_due:
            return
        self._idle_since_s = now_s  # whatever the outcome, the next attempt is that much later
        peers = self._peers()
        if runs is None or peers is None:
            _say("a name of the job cannot be resolved now: the next look is later")
        elif not self._is_below(peers):
            self._is_drained = self._drain(peers)

    def at_end(self, trainers_end_s: float) -> None:
        """Drain, or serve the servers that drain, until all is done or there is no time. Blocks.

        When processes of the job still answer elsewhere after ``trainers_end_s`` seconds, the job
        goes on without this host, and there is nothing to drain. Where their names cannot be
        resolved for so long, RAM is drained: that harms no job.
        """
        left_s = trainers_end_s
        while (runs := self._runs_elsewhere()) is not False:
            if left_s <= 0 or self._hurrying.wait(_ASK_EVERY_S):
                break
            left_s -= _ASK_EVERY_S
        if runs:
            _say("the job runs on other hosts: nothing is drained")
            return
        peers = self._peers() or []
        candidates = candidates_of(self._own, self._answering(peers))
        others = [address for address in candidates if address != self._own]
        while (turn := turn_at_the_end(self._own, candidates, self._answering(others))) == "wait":
            if self._hurrying.wait(_ASK_EVERY_S):
                return
        if turn == "drain":
            self._drain(peers)

    def _runs_here(self) -> bool:
        for path in process_directories(self._args.local_dir / self._args.run_id):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if current_holder(path, self._args.owner) is not None:
                    return True
        return False

    def _runs_elsewhere(self) -> bool | None:
        """Return whether a process of the job answers, None where nobody knows its address."""
        trainers = _addresses(self._args.trainers)
        return None if trainers is None else bool(self._answering(trainers))

    def _peers(self) -> list[str] | None:
        """Return the other servers, sorted; None where nobody knows their addresses."""
        addresses = _addresses(self._args.peers)
        return None if addresses is None else sorted(addresses - {self._own})

    def _is_below(self, peers: Sequence[str]) -> bool:
        """Return whether a server before this one answers, which then is the one to drain."""
        return any(self._answers(address) for address in peers if address < self._own)

    def _answering(self, addresses: Iterable[str]) -> set[str]:
        asked = list(addresses)
        with ThreadPoolExecutor(_THREADS, "eckpt-drain") as pool:
            answers = list(pool.map(self._answers, asked))
        return {address for address, answer in zip(asked, answers, strict=True) if answer}

    def _answers(self, address: str) -> bool:
        try:
            self._client.greet(address, _ANSWER_S)
        except CheckpointError:
            return False
        return True

    def _drain(self, peers: Sequence[str]) -> bool:
        """Drain, in a process of its own, which needs JAX and Orbax; return whether all is saved.

        The secret is in the environment, or in a file. A killed drain leaves no half-written step.
        """
        if self._hurrying.is_set():
            return False
        args = self._args
        command = [
            *(sys.executable, "-m", "emergency_ckpt.tools.cli.main", "drain"),
            *("--dir", args.drain_to, "--run-id", args.run_id, "--local-dir", str(args.local_dir)),
        ]
        for name, value in (("--secret-file", args.secret_file), ("--owner", args.owner)):
            if value is not None:
                command += [name, str(value)]
        if peers:
            command += ["--peers", ",".join(peers)]
        _say(f"the job is over: drain to {args.drain_to}")
        with subprocess.Popen(command) as process:
            while process.poll() is None:
                if self._hurrying.wait(_LOOK_EVERY_S):
                    process.kill()
                    _say("a second signal has ended the drain")
                    return False
        return process.returncode == 0


def _addresses(names: Iterable[str]) -> set[str] | None:
    try:
        return {address for name in names for address in numeric_addresses(name)}
    except NotConnected:  # the resolver fails
        return None


def _say(text: str) -> None:
    print(printable(f"eckpt serve: {text}"), flush=True)
