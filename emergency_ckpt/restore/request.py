"""The request, the report and the result of a restore on one process."""

from __future__ import annotations

import dataclasses

import msgspec

from emergency_ckpt.cluster.shard_source import ProcessHoldings
from emergency_ckpt.core.placement import RetainedShards
from emergency_ckpt.core.restore.inventory import HolderInventory
from emergency_ckpt.core.restore.plan_types import NoPlan, Rejection
from emergency_ckpt.core.shard_layout import shard_sets
from emergency_ckpt.core.timeline import Timeline
from emergency_ckpt.errors import (
    CheckpointError,
    ForeignStep,
    HostStateError,
    StateMismatch,
    StepNotFound,
    Unrecoverable,
)
from emergency_ckpt.state.link import LinkFacts
from emergency_ckpt.state.tree import BoxTable, PyTree, StateTree
from emergency_ckpt.types import SaveId, TierName

_MOST_SETS = 64
"""A state on a mesh has some four sets a process; with more, the leader reads the manifests."""


@dataclasses.dataclass(frozen=True)
class RestoreRequest:
    """The state that one restore or survey is asked for, on this process.

    Attributes:
      like: gives the types of host values.
      requested_step: None: the newest complete step.
      retained: the shards that stay in this process's RAM; None: all shards that it needs.
      tensors_only: do not warn that the step has a host state which no process wants.
    """

    tree: StateTree
    like: PyTree
    requested_step: int | None
    wants_host_state: bool
    retained: RetainedShards | None
    tensors_only: bool = False


@dataclasses.dataclass
class Tally:
    """Bytes of the restored state that this process took from each place.

    ``by_holder``: the bytes from peers, by the name of the holder.
    """

    local: int = 0
    peer: int = 0
    persistent: int = 0
    by_holder: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True)
class RestoredState:
    """The restored step, as this process has it.

    Attributes:
      save: the step's identity; the step is in RAM now, wherever it came from.
      tier: where this process's part came from.
      gathered: digest of the slot that alone has all that this process keeps, if there is one.
      is_loaded: this restore loaded the step from storage, on all processes.
      timeline: the newest timeline that any process, or storage, had.
      lives: as in ``RestorePlan``.
      lack: why a part of the step is not in this process's RAM; empty when all of the step is.
      lacks_room: as in ``Status``.
      incarnation: the id under which the job saves from now on; empty until all processes have
        their part.
      all_kept: as in ``AllDone``.
    """

    save: SaveId
    tier: TierName
    state: PyTree
    tally: Tally
    gathered: str | None
    is_loaded: bool
    rejected: tuple[Rejection, ...]
    timeline: Timeline | None
    lives: int
    lack: str
    lacks_room: bool
    incarnation: str = ""
    all_kept: bool = False


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """The report of a restore, on this process.

    Attributes:
      step: the restored step.
      tier: where this process took its part from: ``"local"`` (own RAM and peers') or
        ``"persistent"``.
      seconds: from the call to the return.
      bytes_local, bytes_peer, bytes_persistent: bytes of tensors read from the own ramdisk, from
        peers and from the persistent directory. Bytes that this process read from storage for its
        peers count as persistent; bytes that it read from storage for itself do not count as local.
      host_state: the restored non-tensor state: the payload, or the object after ``set_state``.
      rejected: newer steps that were not complete, and what each lacked.
      link: what a probe at the start found between the devices and host memory.
    """

    step: int
    tier: TierName
    seconds: float
    bytes_local: int
    bytes_peer: int
    bytes_persistent: int
    host_state: object
    rejected: tuple[Rejection, ...]
    link: LinkFacts


class CompleteSteps(msgspec.Struct, frozen=True, tag="steps", forbid_unknown_fields=True):
    """The steps that a restore could bring back now, by tier, oldest first."""

    local: tuple[int, ...] = ()
    persistent: tuple[int, ...] = ()


def no_plan_error(answer: NoPlan, run: str) -> CheckpointError:
    """Return the error for the caller when there are steps, but none may be restored."""
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
                hint="set host_state_remap (docs/policies.md has recipes), or start as many"
                " processes as at the save",
            )
        case "no_host_state":
            return HostStateError(
                "restore",
                f"host states of {step}",
                "it has tensors only: plain Orbax wrote it, or its host_state directory is gone",
                hint="call restore without host_state, to start with the non-tensor state as it is"
                " now",
            )
        case "foreign":
            return ForeignStep(
                "restore",
                step,
                "; ".join(answer.missing),
                hint="'eckpt doctor --adopt --dir' with this directory takes it in; move it"
                " elsewhere to go on without it",
            )
        case "step_not_found":
            return StepNotFound("restore", step, "; ".join(answer.missing))
        case _:
            return Unrecoverable(run, answer.missing)


def described(
    holdings: ProcessHoldings, boxes: BoxTable
) -> tuple[HolderInventory, tuple[str, ...] | None]:
    """Return this process's inventory with its sets of shards, and the sets that it needs.

    ``boxes``: of the wanted state. A manifest of other boxes, as of another mesh, has no sets.
    """
    inventory = holdings.inventory()
    sets: dict[str, dict[str, str]] = {}
    for manifest in inventory.tensors:
        contents = holdings.contents(manifest.digest)
        if contents is None:
            continue
        groups = boxes.groups_of(map(contents.shard_id, range(len(contents.shards))))
        if groups is not None and len(set(groups)) <= _MOST_SETS:
            sets[manifest.digest] = shard_sets(contents, groups)
    needs = boxes.needs_of(holdings.process_index)
    named = msgspec.structs.replace(inventory, sets=sets)
    return named, needs if len(needs) <= _MOST_SETS else None
