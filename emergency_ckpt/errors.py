"""Typed errors. Each carries the operation, its object, expected and actual values, and a hint.

Message form: ``<operation> <object>: <problem> (expected ..., got ...); <hint>``.
"""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(Exception):
    """Base of every error of this package.

    Attributes:
      operation: the failed operation, e.g. ``"restore"``.
      target: its object, e.g. ``"step 40"`` or a path.
      problem: what is wrong, one clause.
      expected, actual: the two sides of a comparison, if there is one.
      hint: a possible remedy.
      retryable: True when the same call may succeed later without a change by the user.
    """

    retryable = False

    def __init__(
        self,
        operation: str,
        target: str,
        problem: str,
        *,
        expected: object = None,
        actual: object = None,
        hint: str = "",
    ) -> None:
        self.operation = operation
        self.target = target
        self.problem = problem
        self.expected = expected
        self.actual = actual
        self.hint = hint
        text = f"{operation} {target}: {problem}"
        sides = (("expected", expected), ("got", actual))
        if given := ", ".join(f"{word} {side}" for word, side in sides if side is not None):
            text += f" ({given})"
        super().__init__(f"{text}; {hint}" if hint else text)


class ConfigError(CheckpointError):
    """The configuration is invalid; ``problems`` lists every fault, not just the first."""

    def __init__(self, problems: Sequence[str], *, target: str = "EmergencyCheckpointer") -> None:
        self.problems = tuple(problems)
        super().__init__("configure", target, "; ".join(self.problems))


class StateMismatch(CheckpointError, ValueError):
    """The given state does not have the leaves, shapes or dtypes of the checkpoint.

    ``mismatches`` has one line per leaf, with both values.
    """

    def __init__(self, operation: str, target: str, mismatches: Sequence[str]) -> None:
        self.mismatches = tuple(mismatches)
        lines = "".join(f"\n  {line}" for line in self.mismatches)
        super().__init__(
            operation,
            target,
            f"checkpoint tree dtypes or shapes differ from the given state in"
            f" {len(self.mismatches)} leaves:{lines}\n",
            hint="pass a state like the saved one, or use another directory",
        )


class MissingDependency(CheckpointError, ImportError):
    """A module needs another project that is not installed, or in another version."""


class InvalidState(CheckpointError):
    """A leaf of the given state cannot be checkpointed (unsupported type, duplicate path)."""


class LocalTierError(CheckpointError):
    """The ramdisk cannot be used (missing, read-only, locked by another process)."""


class RamdiskFull(LocalTierError):
    """The ramdisk has no room for what must be reserved. Raised before a byte is written."""


class MemoryLimitReached(RamdiskFull):
    """The ramdisk has room, but the job may not take as much memory: the kernel would kill it."""


class HostStatesFull(LocalTierError):
    """RAM has as many host states as it may have, whatever room the ramdisk has."""


class MappingRefused(LocalTierError):
    """Host memory cannot be mapped for the devices' DMA; saves and restores go on without it."""


class SlotBusy(LocalTierError):
    """No slot may be written now: each is read, or holds a step that must be kept."""

    retryable = True


class CorruptData(CheckpointError):
    """Bytes do not have the digest or CRC32C of capture time, or cannot be decoded."""


class OtherFormat(CorruptData):
    """A newer or an older version of this package, with another format, wrote a file."""


class HostStateError(CheckpointError):
    """A process's non-tensor state cannot be stored or restored."""


class HostStateTooLarge(HostStateError):
    """A process's non-tensor state has too many bytes, or too many lists and dicts."""


class TransferError(CheckpointError):
    """A peer did not deliver the requested bytes."""

    retryable = True


class AuthenticationFailed(TransferError):
    """Received bytes are not what the peer, which has proved the run's secret, sealed."""


class PeerUnreachable(TransferError):
    """A peer did not answer at the start of a job that requires "peers"."""


class ProtocolViolation(TransferError):
    """The other side sent a frame that the protocol does not allow."""

    retryable = False


class NotHeld(TransferError):
    """The peer does not hold the requested object, or no longer."""

    retryable = False


class CoordinationError(CheckpointError):
    """JAX's coordination service failed or refused a call."""


class PeerLeft(CoordinationError):
    """Another process of the job has left or died, so what is waited for never comes."""


class DeadlineExceeded(CheckpointError):
    """A wait reached its deadline; ``missing`` names the processes waited for.

    Attributes:
      reason: the problem without the processes.
      more: the number of further processes, which an error that another process has sent leaves
        out of ``missing``.
    """

    retryable = True

    def __init__(
        self,
        operation: str,
        target: str,
        problem: str,
        *,
        missing: Sequence[str] = (),
        more: int = 0,
        hint: str = "",
    ) -> None:
        self.reason = problem
        self.missing = tuple(missing)
        self.more = more
        if self.missing:
            problem = f"{problem}; missing: {', '.join(self.missing)}"
        if more:
            problem += f" and {more} more"
        super().__init__(operation, target, problem, hint=hint)


class SaveFailed(CheckpointError):
    """A background save failed. Training continues; the next save tries again."""

    retryable = True


class RestoreFailed(CheckpointError):
    """A restore failed on some process, and therefore on all."""


class SourceUnreachable(RestoreFailed):
    """A source that a restore needs did not answer in time; it may still have the bytes.

    Raised instead of restoring an older step, which would discard training.
    """

    retryable = True


class HolderUnreachable(SourceUnreachable):
    """Holders of a copy in RAM did not answer, and nothing else has moved."""


class ForeignStep(RestoreFailed):
    """Another program wrote the newest step, and the step log does not name it."""


class StepNotFound(RestoreFailed, ValueError):
    """The requested step is not complete in any tier."""


class PersistentTierError(CheckpointError):
    """The persistent directory could not be read or written.

    Attributes:
      unreachable: storage did not answer, or refused; the step may still exist.
    """

    unreachable = False


class DirectoryInUse(PersistentTierError):
    """Another run saves in the persistent directory, or a newer job of this one."""


class StorageLost(PersistentTierError):
    """This life has seen the step log of the persistent directory, and the log is gone."""

    unreachable = True


class StorageUnreachable(SourceUnreachable, PersistentTierError):
    """Storage did not answer, or not fast enough; its steps count as complete."""

    unreachable = True


class Unrecoverable(CheckpointError):
    """Checkpoints existed, but no complete step is left; ``missing`` lists the losses."""

    def __init__(self, target: str, missing: Sequence[str]) -> None:
        self.missing = tuple(missing)
        lines = "".join(f"\n  {line}" for line in self.missing)
        super().__init__(
            "restore",
            target,
            f"no complete step is left in any tier:{lines}\n",
            hint="bring back a lost host with its RAM, or remove the leftovers for a fresh start",
        )


class JobFailed(CheckpointError):
    """A supervised job ended without success: too many restarts, configuration error or stop."""
