"""What must hold of storage, wherever a life was stopped: of bytes, and of what readers see.

Three readers look: a restore by a tier that knows nothing of before, ``format_reader``, which was
written from FORMAT.md alone, and plain Orbax.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from format_reader import FOREIGN, read_storage
from operations import State
from persistent_steps import complete_steps, value_of
from seams import Files, Place

from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.storage import PersistentTier


@dataclass
class Seen:
    """What readers find in a directory.

    Attributes:
      plain: what plain Orbax lists, but for steps of others that the log does not name.
      foreign: these.
      leftovers: folders of no step that the second reader lists as whole.
      problems: what none may find.
    """

    state: State
    plain: dict[int, Any]
    files: dict[str, bytes]
    foreign: set[int] = field(default_factory=set)
    leftovers: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def read(self, what: str, work: Callable[[], Any]) -> Any:
        """Return what ``work`` reads; its error is a problem."""
        try:
            return work()
        except CheckpointError as error:
            self.problems.append(f"{what}: {type(error).__name__}: {error}"[:400])
            return None

    def must(self, holds: object, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


def look(place: Place, run: str) -> Seen:
    """Read all that counts, and all that plain Orbax lists, to the last byte."""
    files = place.files(run)
    tier = PersistentTier(place.url(run))
    seen = Seen({}, {}, files)
    second = read_storage(Files(files), is_bucket=place.name == "bucket")
    if second.refusal or any(fault.startswith("version") for fault in second.faults):
        seen.problems.append(f"the second reader: {second.refusal or second.faults}")
    for each in second.counting:
        seen.problems += [f"the second reader, step {each.step}: {f}" for f in each.faults]
    steps = complete_steps(tier)
    if steps != [each.step for each in second.counting]:
        counting = [each.step for each in second.counting]
        seen.problems.append(f"restores see {steps}, the second reader {counting}")
    for step in steps:
        seen.state[step] = seen.read(f"restore of {step}", lambda: value_of(tier, step))  # noqa: B023
    seen.foreign = {each.step for each in second.steps if each.problem == FOREIGN}
    whole = {each.tensors for each in second.steps if each.problem in ("", FOREIGN)}
    if place.name == "disk":  # README.md: of a bucket this does not hold yet
        tops = {name.split("/")[0] for name in files} - whole
        seen.leftovers = sorted(n for n in tops if n.isdigit() or "checkpoint-tmp" in n)
    plain = _seen_by_plain_orbax(place.url(run), seen)
    seen.plain = {step: value for step, value in plain.items() if step not in seen.foreign}
    return seen


def by_number(place: Place, run: str, step: int) -> Any:
    """Return the value of a step that need not count, as a restore of its number has it."""
    return value_of(PersistentTier(place.url(run)), step)


_MEMO: dict[str, Any] = {}


def _seen_by_plain_orbax(url: str, seen: Seen) -> dict[int, Any]:
    with ocp.CheckpointManager(url) as manager:
        steps = sorted(manager.all_steps())
    found: dict[int, Any] = {}
    for step in steps:
        key = _digest(seen.files, f"{step}/")
        if key not in _MEMO:  # what Orbax makes of these bytes
            _MEMO[key] = _plain_value(url, step, has_items=f"{step}/state/_METADATA" in seen.files)
        found[step] = _MEMO[key]
        if isinstance(found[step], str):
            seen.problems.append(f"plain Orbax lists {step} and cannot read it: {found[step]}")
    for name in seen.files:  # Orbax reads an item in a bucket alone, too, by its own commit
        folder, _, end = name.rpartition("/")
        is_item = folder.endswith("/state") and "checkpoint-tmp" not in folder  # no removal's
        if end == "commit_success.txt" and is_item and folder[0] != "h":
            key = _digest(seen.files, f"{folder}/")
            if key not in _MEMO:
                _MEMO[key] = _item_value(f"{url}/{folder}")
            seen.must(not isinstance(_MEMO[key], str), f"{folder} alone: {_MEMO[key]}")
    return found


def _item_value(folder: str) -> Any:
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            (value,) = set(np.asarray(checkpointer.restore(folder)["w"]).tolist())
    except Exception as error:  # noqa: BLE001 - Orbax raises errors of any type
        return f"{type(error).__name__}: {error}"[:200]
    return value


def _plain_value(url: str, step: int, *, has_items: bool) -> Any:
    args: Any = ocp.args.StandardRestore()
    try:
        with ocp.CheckpointManager(url) as manager:
            if has_items:
                read = manager.restore(step, args=ocp.args.Composite(state=args)).state
            else:
                read = manager.restore(step, args=args)
        (value,) = set(np.asarray(read["w"]).tolist())
    except Exception as error:  # noqa: BLE001 - Orbax raises errors of any type
        return f"{type(error).__name__}: {error}"[:200]
    return value


def _digest(files: Mapping[str, bytes], prefix: str) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        if name.startswith(prefix):
            digest.update(f"{name} {len(files[name])} ".encode() + files[name])
    return digest.hexdigest()


def files_of(step: int | None, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a complete step, in its own place."""
    prefixes = (f"{step}/", f"host_state/{step}/")
    return {name: data for name, data in files.items() if name.startswith(prefixes)}
