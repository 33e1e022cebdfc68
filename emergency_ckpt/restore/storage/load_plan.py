"""The leader's plan to load a persistent step into the RAM of all processes.

Each byte leaves storage once, spread over all processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emergency_ckpt.core.restore.inventory import Inventory, Quarantined
from emergency_ckpt.core.restore.leaves import PYTHON_NUMBERS
from emergency_ckpt.core.restore.plan_types import RestorePlan, TargetSet
from emergency_ckpt.core.restore.storage_read import StoredArray, assign_reads
from emergency_ckpt.restore.protocol import DocumentRead, LoadPart, LoadPlan, StorageRead
from emergency_ckpt.storage.tier import StoredStep
from emergency_ckpt.types import Box, LeafSpec, SaveId


def plan_load(
    plan: RestorePlan,
    stored: StoredStep,
    arrays: Mapping[str, StoredArray],
    targets: Mapping[int, TargetSet],
    leaves: Mapping[str, LeafSpec],
    run_id: str,
    *,
    wants_host_state: bool,
) -> LoadPlan:
    """Return the part of each process in bringing a persistent step into RAM. Deterministic."""
    marker = stored.marker
    digests: Sequence[str] = ("",) * len(targets) if marker is None else marker.digests
    saved: dict[str, list[Box]] = {}
    for shard in stored.crcs:
        saved.setdefault(shard.leaf, []).append(shard.box)
    parts: dict[int, LoadPart] = {}
    for process, shards in assign_reads(targets, arrays, saved).items():
        parts[process] = LoadPart(
            reads=tuple(StorageRead(shard, stored.crcs.get(shard)) for shard in shards),
            arrays={leaf: arrays[leaf] for leaf in sorted({shard.leaf for shard in shards})},
            documents=tuple(
                DocumentRead(owner, digests[owner])
                for owner in range(process, len(digests), len(targets))
            )
            if wants_host_state
            else (),
        )
    return LoadPlan(
        step=plan.step,
        save=SaveId(plan.step, stored.incarnation, run_id),
        item=stored.item,
        complete=marker is not None,
        parts=parts,
        numbers=_stored_numbers(stored, arrays, leaves),
        documents=stored.documents,
        document_count=len(digests) if wants_host_state else 0,
        rejected=plan.rejected,
    )


def _stored_numbers(
    stored: StoredStep, arrays: Mapping[str, StoredArray], wanted: Mapping[str, LeafSpec]
) -> dict[str, str]:
    """By path, the dtypes of the wanted Python numbers; ``match_leaves`` found them right."""
    dtypes = {leaf.array.full_name: leaf.spec.dtype for leaf in stored.leaves.values()}
    found = {path: dtypes[array.full_name] for path, array in arrays.items()}
    if stored.marker is not None:
        found |= {leaf.path: leaf.dtype for leaf in stored.marker.leaves}
    return {p: dtype for p, dtype in found.items() if wanted[p].dtype in PYTHON_NUMBERS}


def loaded_copies(plan: LoadPlan, inventory: Inventory) -> set[Quarantined]:
    """Every quarantine entry that may be of a copy that the plan, carried out, has replaced. Pure.

    Args:
      inventory: as reported after the load.
    """
    replaced: set[tuple[str, str]] = set()
    for holder in inventory.holders:
        part = None if holder.process_index is None else plan.parts.get(holder.process_index)
        if part is None:
            continue
        shards = {read.shard for read in part.reads}
        owners = {document.owner for document in part.documents}
        for tensors in holder.tensors:
            contents = inventory.manifests.get(tensors.digest)
            if tensors.save != plan.save or contents is None:
                continue
            held = {contents.shard_id(index) for index in range(len(contents.shards))}
            if held == shards:
                replaced.add((holder.holder, tensors.digest))
        replaced.update(
            (holder.holder, state.digest)
            for state in holder.host_states
            if (state.save, state.count) == (plan.save, plan.document_count)
            and state.owner in owners
        )
    return {item for item in inventory.quarantined if (item.holder, item.digest) in replaced}
