"""Messages between the processes of a restore, and the caller's report of it."""

from __future__ import annotations

import dataclasses
from typing import Literal

import msgspec

from emergency_ckpt.core.restore.inventory import HolderInventory, Quarantined
from emergency_ckpt.core.restore.plan_types import NoPlan, Rejection, RestorePlan
from emergency_ckpt.core.restore.storage_read import StoredArray
from emergency_ckpt.errors import (
    CheckpointError,
    HolderUnreachable,
    HostStateError,
    PersistentTierError,
    RamdiskFull,
    ReplicasDiffer,
    RestoreFailed,
    StateMismatch,
    StepNotFound,
    StorageUnreachable,
    Unrecoverable,
)
from emergency_ckpt.types import SaveId, ShardId, TierName


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process's inventory, and a digest of the state that it wants back.

    Attributes:
      damaged: by digest, shards of its own copies that it found damaged or outvoted before.
    """

    inventory: HolderInventory
    state_digest: str
    wants_host_state: bool
    damaged: dict[str, tuple[int, ...]] = {}

    @property
    def quarantined(self) -> set[Quarantined]:
        """Return what must not be used of the inventory."""
        return {
            Quarantined(self.inventory.holder, digest, shard)
            for digest, shards in self.damaged.items()
            for shard in shards
        }


class AttemptCancelled(RestoreFailed):
    """A process does not want any more what all were about to restore. Nothing is wrong."""


FailureKind = Literal["failed", "given_up", "holder", "storage", "no_room"]
"""Cause that ends a restore: a fault; a process withdrew; a holder of copies in RAM, or
storage, could not be reached. The last one ends none: the process that found no room in its
ramdisk uses memory from then on, and all try again."""


class Status(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The outcome of one process's part of a plan.

    ``unusable`` names copies that failed; with them the leader plans anew, as it does when the
    ``kind`` is "no_room". Any other ``error`` with nothing unusable ends the restore on all
    processes.
    """

    error: str = ""
    unusable: tuple[Quarantined, ...] = ()
    kind: FailureKind = "failed"


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The leader's decision on all statuses: done, once more, or the end.

    ``done``: of a ``LoadPlan`` too; the step lies in RAM then. ``kind``: of the ``error``, where
    all processes that ended it agree on one, else ``failed``. ``incarnation``: the id under which
    the job saves from now on, where the restore is done.
    """

    done: bool = False
    error: str = ""
    kind: FailureKind = "failed"
    incarnation: str = ""


class PlanFailed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """The leader could not plan at all; nobody restores."""

    error: str
    kind: FailureKind = "failed"


def failure_kind(error: Exception) -> FailureKind:
    """Return what ``error`` means for all processes of the restore."""
    match error:
        case AttemptCancelled():
            return "given_up"
        case HolderUnreachable():
            return "holder"
        case PersistentTierError(unreachable=True, retryable=True):
            return "storage"
        case RamdiskFull():
            return "no_room"
        case _:
            return "failed"


def failure_of(kind: FailureKind, target: str, problem: str) -> RestoreFailed:
    """Return the error that every process raises."""
    match kind:
        case "given_up":
            hint = "no process has restored anything"
            return AttemptCancelled("restore", target, problem, hint=hint)
        case "holder":
            hint = f"{_UNREACHABLE_HINT}. {_SILENCE_HINT}"
            return HolderUnreachable("restore", target, problem, hint=hint)
        case "storage":
            return StorageUnreachable("restore", target, problem, hint=_UNREACHABLE_HINT)
        case "failed" | "no_room":
            hint = "no process has restored anything"
            return RestoreFailed("restore", target, problem, hint=hint)


_UNREACHABLE_HINT = (
    "no process has restored anything; restore again: what cannot be reached is not lost."
    " An older step is taken only when it is asked for by its number"
)
_SILENCE_HINT = (
    "A peer may be silent for transfer_timeout_s, the restore may take restore_timeout_s, and JAX"
    " aborts the job after heartbeat_timeout_seconds (of jax.distributed.initialize)"
)


class StorageRead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box to read from storage, and the CRC32C of its bytes at capture where that is known."""

    shard: ShardId
    crc32c: int | None


class DocumentRead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A host-state document to bring into RAM; without a ``digest`` there is none: it is empty."""

    owner: int
    digest: str


class LoadPart(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The part of one process: reads from storage into RAM, and how their leaves are stored."""

    reads: tuple[StorageRead, ...] = ()
    arrays: dict[str, StoredArray] = {}
    documents: tuple[DocumentRead, ...] = ()


class LoadPlan(msgspec.Struct, frozen=True, tag="load", forbid_unknown_fields=True):
    """Bring a persistent step into RAM. Each byte is read once over the whole job.

    Attributes:
      save: identity under which it is published in RAM.
      item: directory with its arrays.
      complete: storage holds every chunk, also those of zeros.
      numbers: the stored dtypes of leaves that are Python numbers in the wanted state.
      documents: folder of the host states, below ``host_state``.
      document_count: number of processes that the host states are of; 0: none are brought.
    """

    step: int
    save: SaveId
    item: str
    complete: bool
    parts: dict[int, LoadPart]
    numbers: dict[str, str] = {}
    documents: str = ""
    document_count: int = 0
    rejected: tuple[Rejection, ...] = ()

    def share_of(self, process: int) -> LoadPlan:
        """This plan with the part of one process only: what is sent to that process."""
        part = self.parts.get(process, LoadPart())
        return msgspec.structs.replace(self, parts={process: part})


def passed_over(plan: RestorePlan | LoadPlan, run_id: str) -> set[SaveId]:
    """Return the saves in RAM that the plan passed over: none of them is whole."""
    return {
        SaveId(each.step, each.incarnation, run_id)
        for each in plan.rejected
        if each.incarnation is not None
    }


class CompleteSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps that a restore could bring back now, by tier, oldest first."""

    local: tuple[int, ...] = ()
    persistent: tuple[int, ...] = ()


class SurveyAnswer(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The leader's answer to a survey: the steps, or the reason why there is none."""

    steps: CompleteSteps = CompleteSteps()
    error: str = ""


Answer = RestorePlan | NoPlan | PlanFailed | LoadPlan


@dataclasses.dataclass
class Tally:
    """Bytes of the restored state that this process took from each place.

    ``by_holder``: those from peers, by the name of the holder.
    """

    local: int = 0
    peer: int = 0
    persistent: int = 0
    by_holder: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """The report of a restore, on this process.

    Attributes:
      step: the restored step.
      tier: where this process took its part from, in this restore or in the prefetch that it used:
        ``"local"`` (own RAM and peers') or ``"persistent"``.
      seconds: from the call to the return.
      overlapped_seconds: of a prefetch that this process used, how long it had worked before the
        call.
      bytes_local, bytes_peer, bytes_persistent: bytes of tensors read from the own ramdisk, from
        peers and from the persistent directory. What this process read from storage for its peers
        counts too; what it then took from its own RAM does not.
      host_state: the restored non-tensor state: the payload, or the object after ``set_state``.
      rejected: newer steps that were not whole, and what each lacked.
    """

    step: int
    tier: TierName
    seconds: float
    bytes_local: int
    bytes_peer: int
    bytes_persistent: int
    host_state: object
    rejected: tuple[Rejection, ...]
    overlapped_seconds: float = 0.0


def no_plan_error(answer: NoPlan, run: str) -> CheckpointError:
    """Return the error for the caller when nothing of what there is may be restored."""
    step = f"step {answer.step}"
    match answer.kind:
        case "state_mismatch":
            return StateMismatch("restore", step, answer.mismatches)
        case "host_state_count":
            return HostStateError(
                "restore",
                f"host states of {step}",
                "they were saved by another number of processes",
                expected=answer.process_count,
                actual=answer.saved_count,
                hint="set host_state_remap (emergency_ckpt.remaps has some), or start as many"
                " processes as at the save",
            )
        case "no_host_state":
            return HostStateError(
                "restore",
                f"host states of {step}",
                "it has tensors only: plain Orbax wrote it, or its host_state directory is gone",
                hint="set allow_missing_host_state to start with the non-tensor state as it is now,"
                " or call restore without host_state",
            )
        case "diverged":
            return ReplicasDiffer(step, answer.missing)
        case "step_not_found":
            return StepNotFound("restore", step, "; ".join(answer.missing))
        case _:
            return Unrecoverable(run, answer.missing)
