"""One step in full: every leaf and shard with its CRC and holders, and the host states."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec

from emergency_ckpt.core.restore.inventory import HeldHostState
from emergency_ckpt.core.shard_layout import DTYPE_ITEM_BYTES, shard_nbytes
from emergency_ckpt.errors import CheckpointError, StepNotFound
from emergency_ckpt.state.host_state import decode
from emergency_ckpt.storage.directory import StorageDirectory
from emergency_ckpt.storage.documents import read_checksums, read_host_state
from emergency_ckpt.storage.marker import StepMarker
from emergency_ckpt.storage.steps.looks import FoundStep
from emergency_ckpt.tools.survey.places import Places, SurveyFault
from emergency_ckpt.tools.survey.ramdisk import ProcessFolder, read_document_of
from emergency_ckpt.tools.survey.storage import look_at
from emergency_ckpt.tools.survey.survey import RamSave, SaveState, StoredSave, Survey
from emergency_ckpt.types import Box, LeafSpec

FORMAT = 1

_TEXT_CHARS = 120
_ITEMS = 16
_DEPTH = 16


class ShownShard(msgspec.Struct, frozen=True):
    """One box of a leaf, with one value of its bytes.

    Attributes:
      crc32c: of capture time, eight hexadecimal digits; null without a record.
      holders: process directories that have it with this CRC; empty in storage. Two entries of one
        box are replicas that differ.
    """

    box: Box
    size_bytes: int
    crc32c: str | None
    holders: tuple[str, ...]


class ShownLeaf(msgspec.Struct, frozen=True):
    """One leaf. ``shards``: as they were saved; none for an array without elements in storage."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    key_impl: str | None
    size_bytes: int
    shards: tuple[ShownShard, ...]


class ShownHostState(msgspec.Struct, frozen=True):
    """The host state of one process. ``value``: abbreviated, as FORMAT.md describes a payload."""

    process: int
    count: int
    digest: str
    size_bytes: int
    holders: tuple[str, ...]
    value: Any


class ShownStep(msgspec.Struct, frozen=True):
    """One save in one tier. The first fields are those of ``ListedStep``."""

    format: int
    tier: str
    step: int
    run_id: str
    incarnation: str
    state: SaveState
    reason: str
    size_bytes: int
    leaves: tuple[ShownLeaf, ...]
    host_states: tuple[ShownHostState, ...]
    faults: tuple[SurveyFault, ...]


def show_step(
    survey: Survey, places: Places, step: int, *, tier: str = "", incarnation: str = ""
) -> ShownStep:
    """Return the step in full. Blocks for storage.

    Of several saves of the step a whole one is shown first, then that in RAM, then that of the
    newest incarnation.

    Args:
      tier: ``local`` or ``persistent``; empty for either.

    Raises:
      StepNotFound: no place has it.
      CheckpointError: it cannot be described.
    """
    found: list[RamSave | StoredSave] = []
    if tier != "persistent":
        found += [each for each in survey.ram if each.save.step == step]
    if tier != "local":
        found += [each for each in survey.stored if each.step == step]
    if incarnation:
        found = [each for each in found if _incarnation(each) == incarnation]
    if not found:
        raise StepNotFound(
            "show", f"step {step}", "no place that was given has it", hint="'eckpt ls' lists steps"
        )
    # Stable: within a state, RAM comes first and the newest incarnation before older ones.
    best = min(found, key=lambda each: each.state != "whole")
    if isinstance(best, RamSave):
        return _show_ram(best, survey)
    return _show_stored(best, places)


def _incarnation(each: RamSave | StoredSave) -> str:
    return each.save.incarnation if isinstance(each, RamSave) else each.listed.step.incarnation


def _show_ram(each: RamSave, survey: Survey) -> ShownStep:
    contents = each.copies[0].published.contents
    held: dict[str, dict[tuple[Box, int, int], list[str]]] = defaultdict(dict)
    for copy in each.copies:
        held_here = copy.published.contents
        for entry in held_here.shards:
            of_leaf = held[held_here.leaves[entry.leaf].path]
            holders = of_leaf.setdefault((entry.box, entry.nbytes, entry.crc32c), [])
            holders.append(str(copy.folder))
    leaves = tuple(
        _leaf(leaf, [(*key, holders) for key, holders in sorted(held[leaf.path].items())])
        for leaf in contents.leaves
    )
    folders = [folder for folder in survey.folders if folder.run_id == each.save.run_id]
    host_states, faults = _ram_host_states(each, folders)
    return ShownStep(
        format=FORMAT,
        tier="local",
        step=each.save.step,
        run_id=each.save.run_id,
        incarnation=each.save.incarnation,
        state=each.state,
        reason=each.reason,
        size_bytes=sum(leaf.size_bytes for leaf in leaves),
        leaves=leaves,
        host_states=host_states,
        faults=faults,
    )


def _ram_host_states(
    each: RamSave, folders: Sequence[ProcessFolder]
) -> tuple[tuple[ShownHostState, ...], tuple[SurveyFault, ...]]:
    copies: dict[HeldHostState, list[ProcessFolder]] = defaultdict(list)
    for folder in folders:
        for held in folder.host_states:
            if held.save == each.save:
                copies[held].append(folder)
    shown: list[ShownHostState] = []
    faults: list[SurveyFault] = []
    for held, holders in sorted(copies.items(), key=lambda item: item[0]):
        try:
            value = abbreviated(decode(read_document_of(holders[0], held)).payload)
        except CheckpointError as error:
            faults.append(SurveyFault.of(str(holders[0].path), error, each.save.step))
            value = None
        names = tuple(str(folder.path) for folder in holders)
        shown.append(
            ShownHostState(held.owner, held.count, held.digest, held.size_bytes, names, value)
        )
    return tuple(shown), tuple(faults)


def _show_stored(each: StoredSave, places: Places) -> ShownStep:
    (found,) = look_at([each.listed], places)
    if isinstance(found, CheckpointError):
        raise found
    marker = found.marker
    storage = StorageDirectory(places.directory, places.timeout_s)
    host_states: tuple[ShownHostState, ...] = ()
    faults: tuple[SurveyFault, ...] = ()
    if marker is not None:
        crcs = read_checksums(storage, found.place.documents, marker)
        boxes: dict[str, list[tuple[Box, int]]] = defaultdict(list)
        for shard, crc in sorted(crcs.items()):
            boxes[shard.leaf].append((shard.box, crc))
        leaves = tuple(
            _leaf(
                leaf,
                [(box, shard_nbytes(leaf, box), crc, []) for box, crc in boxes.get(leaf.path, ())],
            )
            for leaf in marker.leaves
        )
        host_states, faults = _stored_host_states(storage, found, marker)
    elif found.step.problem:
        leaves = ()
        faults = (SurveyFault(f"{places.directory}/{found.step.step}", found.step.problem),)
    else:
        leaves = tuple(_leaf(leaf, []) for leaf in _plain_leaves(storage, found))
    return ShownStep(
        format=FORMAT,
        tier="persistent",
        step=found.step.step,
        run_id=each.run_id,
        incarnation=found.step.incarnation,
        state="damaged" if found.step.problem else each.state,
        reason=found.step.problem or each.reason,
        size_bytes=sum(leaf.size_bytes for leaf in leaves),
        leaves=leaves,
        host_states=host_states,
        faults=faults,
    )


def _stored_host_states(
    storage: StorageDirectory, found: FoundStep, marker: StepMarker
) -> tuple[tuple[ShownHostState, ...], tuple[SurveyFault, ...]]:
    shown: list[ShownHostState] = []
    faults: list[SurveyFault] = []
    count = len(marker.digests)
    for owner, digest in enumerate(marker.digests):
        value, size_bytes = None, 0
        if not marker.empty[owner]:
            try:
                data = read_host_state(storage, found.place.documents, owner, count, digest)
                value, size_bytes = abbreviated(decode(data).payload), len(data)
            except CheckpointError as error:
                faults.append(SurveyFault.of(error.target, error, found.step.step))
        shown.append(ShownHostState(owner, count, digest, size_bytes, (), value))
    return tuple(shown), tuple(faults)


def _plain_leaves(storage: StorageDirectory, found: FoundStep) -> list[LeafSpec]:
    """Return the leaves of a step of plain Orbax, which only Orbax can read."""
    # Imported here: it takes seconds, and steps of this package do without.
    from emergency_ckpt.storage.plain_orbax import describe_plain  # noqa: PLC0415

    folder = storage.path / found.place.tensors
    _, leaves = storage.do(
        "describe", f"/{found.place.tensors}", lambda: describe_plain(folder, None)
    )
    return [leaf.spec for _, leaf in sorted(leaves.items())]


def _leaf(leaf: LeafSpec, shards: Iterable[tuple[Box, int, int, list[str]]]) -> ShownLeaf:
    return ShownLeaf(
        path=leaf.path,
        dtype=leaf.dtype,
        shape=leaf.global_shape,
        key_impl=leaf.key_impl,
        size_bytes=math.prod(leaf.global_shape) * DTYPE_ITEM_BYTES.get(leaf.dtype, 0),
        shards=tuple(
            ShownShard(box, nbytes, f"{crc:08x}", tuple(holders))
            for box, nbytes, crc, holders in shards
        ),
    )


def abbreviated(value: Any, depth: int = 0) -> Any:
    """Return a JSON value (a host state) of bounded size; a cut says how much was left out."""
    if depth >= _DEPTH and isinstance(value, dict | list):
        return "..."
    if isinstance(value, str) and len(value) > _TEXT_CHARS:
        return f"{value[:_TEXT_CHARS]}... ({len(value)} characters)"
    if isinstance(value, list):
        items = cast("list[Any]", value)
        short = [abbreviated(item, depth + 1) for item in items[:_ITEMS]]
        more = len(items) - _ITEMS
        return [*short, f"... ({more} more)"] if more > 0 else short
    if isinstance(value, dict):
        fields = list(cast("dict[str, Any]", value).items())
        kept = {key: abbreviated(item, depth + 1) for key, item in fields[:_ITEMS]}
        more = len(fields) - _ITEMS
        return {**kept, "...": f"({more} more)"} if more > 0 else kept
    return value
