"""Typed errors. Each carries what failed, where, what was expected and found, and what to do.

Message form: ``<operation> <object>: <problem> (expected ..., got ...); <hint>``.
"""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(Exception):
    """Base of every error of this package.

    Attributes:
      operation: what was being done, e.g. ``"restore"``.
      target: the object it was done to, e.g. ``"step 40"`` or a path.
      problem: what is wrong, one clause.
      expected, actual: the two sides of a comparison, where there is one.
      hint: what the reader can do about it.
      retryable: True when the same call may succeed later with nothing changed by the user.
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
        super().__init__(self._message())

    def _message(self) -> str:
        text = f"{self.operation} {self.target}: {self.problem}"
        if self.expected is not None or self.actual is not None:
            text += f" (expected {self.expected}, got {self.actual})"
        return f"{text}; {self.hint}" if self.hint else text


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
            hint="pass the state that the checkpoint was made from, or another directory",
        )


class MissingDependency(CheckpointError, ImportError):
    """A module needs another project that is not installed."""


class InvalidState(CheckpointError):
    """A leaf of the given state cannot be checkpointed (unsupported type, duplicate path)."""


class LocalTierError(CheckpointError):
    """The ramdisk cannot be used (missing, read-only, locked by another process)."""


class RamdiskFull(LocalTierError):
    """The ramdisk has no room for what must be reserved. Raised before a byte is written."""


class SlotBusy(LocalTierError):
    """No slot may be written now: each is lent to JAX arrays or holds the last complete step."""

    retryable = True


class CorruptData(CheckpointError):
    """Bytes do not have the digest or CRC32C of capture time, or cannot be decoded."""


class NotSigned(CorruptData):
    """A file on the ramdisk that is sound, but not signed with the secret of this run."""


class HostStateError(CheckpointError):
    """A process's non-tensor state cannot be stored or brought back."""


class HostStateTooLarge(HostStateError):
    """A process's non-tensor state is over the configured bound."""


class TransferError(CheckpointError):
    """A peer did not deliver."""

    retryable = True


class AuthenticationFailed(TransferError):
    """The other side does not know the secret of this run."""

    retryable = False


class ProtocolViolation(TransferError):
    """The other side sent a frame that the protocol does not allow."""

    retryable = False


class NotHeld(TransferError):
    """The peer does not hold what was asked for (any more)."""

    retryable = False


class CoordinationError(CheckpointError):
    """JAX's coordination service failed or refused."""


class ForgedValue(CoordinationError):
    """A key of the coordination service holds what no process of this start of the job wrote."""


class PeerLeft(CoordinationError):
    """Another process of the job has left, and what is waited for never comes."""


class DeadlineExceeded(CheckpointError):
    """A wait ran out of time; ``missing`` names who was waited for."""

    retryable = True

    def __init__(
        self,
        operation: str,
        target: str,
        problem: str,
        *,
        missing: Sequence[str] = (),
        hint: str = "",
    ) -> None:
        self.missing = tuple(missing)
        if self.missing:
            problem = f"{problem}; missing: {', '.join(self.missing)}"
        super().__init__(operation, target, problem, hint=hint)


class SaveFailed(CheckpointError):
    """A background save failed. Training goes on; the next save tries again."""

    retryable = True


class RestoreFailed(CheckpointError):
    """A restore failed on some process, and so, together, on all."""


class SourceUnreachable(RestoreFailed):
    """A source that a restore needs could not be reached in time; nothing says that it is gone.

    Raised instead of restoring an older step, which would throw training away.
    """

    retryable = True


class HolderUnreachable(SourceUnreachable):
    """Holders of a copy in RAM did not answer until the deadline."""


class StepNotFound(RestoreFailed, ValueError):
    """The requested step is whole in no tier."""


class ReplicasDiffer(RestoreFailed):
    """Replicas of a shard differ, no majority decides, and ``on_divergence`` is ``"stop"``.

    ``differences`` has one line per shard: step, leaf, box, and the holders of each CRC32C.
    """

    def __init__(self, target: str, differences: Sequence[str]) -> None:
        self.differences = tuple(differences)
        lines = "".join(f"\n  {line}" for line in self.differences)
        super().__init__(
            "restore",
            target,
            f"its replicas differ, and no majority says which is right:{lines}\n",
            hint="no process has restored anything, and no older step is taken by itself: ask for"
            " one by its number, remove the copy that is wrong, or set on_divergence='warn'",
        )


class PersistentTierError(CheckpointError):
    """The persistent directory could not be read or written.

    Attributes:
      unreachable: storage did not answer, or refused to: nothing says that a step is not there.
    """

    unreachable = False


class DirectoryInUse(PersistentTierError):
    """Another run saves in the persistent directory, or a newer job of this one."""


class StorageUnreachable(SourceUnreachable, PersistentTierError):
    """Storage did not answer until the deadline; what it holds counts as whole."""

    unreachable = True


class Unrecoverable(CheckpointError):
    """Checkpoints existed, but no whole step is left in any tier; ``missing`` says what is lost."""

    def __init__(self, target: str, missing: Sequence[str]) -> None:
        self.missing = tuple(missing)
        lines = "".join(f"\n  {line}" for line in self.missing)
        super().__init__(
            "restore",
            target,
            f"no whole step is left in any tier:{lines}\n",
            hint="bring back a lost host with its RAM, or remove the leftovers to start afresh",
        )


class JobFailed(CheckpointError):
    """A supervised job ended without success: crash loop, too many restarts, timeout or stop."""
