"""A step as a directory of plain Orbax, published by one rename.

``<directory>/<step>/`` is the Orbax step, and ``<directory>/host_states/`` has the payload of each
process's host state as JSON (FORMAT.md), where the step has any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import msgspec
from etils import epath

from emergency_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptData,
    HostStateError,
    PersistentTierError,
)
from emergency_ckpt.state.host_state import decode as decode_document
from emergency_ckpt.state.host_state import document_name
from emergency_ckpt.storage.item.documents import SHARDINGS
from emergency_ckpt.storage.item.state import JAX_ARRAY, NUMPY_ARRAY
from emergency_ckpt.storage.late_arrays import (
    late_array,
    tree_like,
    tree_of,
    write_late_step,
)
from emergency_ckpt.storage.marker import ITEM, OURS
from emergency_ckpt.storage.orbax_names import STEP_METADATA, TREE
from emergency_ckpt.tools.offline.host_states import ram_documents, stored_documents
from emergency_ckpt.tools.offline.named_steps import find_source
from emergency_ckpt.tools.offline.ram import RamSource
from emergency_ckpt.tools.offline.step_source import leaf_bytes, read_leaf
from emergency_ckpt.tools.offline.stored_source import StoredSource
from emergency_ckpt.tools.survey.places import Places
from emergency_ckpt.tools.survey.storage import look_at
from emergency_ckpt.tools.survey.survey import take_survey

HOST_STATES = "host_states"
_LEFT_OUT = "the host states are left out"
_GUESSED = (
    "RAM has no structure of the state but the paths of its leaves: all its nodes are dicts (give"
    " a --dir with a step of the same leaves for the structure)"
)
_CHUNKED_BYTES = 16 << 20  # smaller leaves are one chunk
_COPY_BYTES = 16 << 20

Progress = Callable[[int], None]
Shown = Callable[[str, int], AbstractContextManager[Progress]]
"""Shows the progress of some work of so many bytes."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """An exported step. ``notes``: copies that were passed over, and what was left out."""

    name: str
    leaves: int
    notes: tuple[str, ...]
    is_complete: bool = True


def use_no_accelerator() -> None:
    """Let JAX initialise its CPU backend alone. Before any other use of it in this process."""
    jax.config.update("jax_platforms", "cpu")


def export_step(name: str, directory: Path, places: Places, shown: Shown) -> Exported:
    """Write the step called ``name`` to ``directory``. Blocks; nothing is left after an error.

    ConfigError when the directory exists; StepNotFound, CorruptData, PersistentTierError.
    """
    check_new(directory)
    with contextlib.closing(find_source(name, places)) as source:
        size_bytes = sum(map(leaf_bytes, source.leaves.values()))
        with Export(directory) as export, shown("export", size_bytes) as progress:
            if isinstance(source, RamSource):
                notes = _export_ram(export, source, places, progress)
            elif isinstance(source, StoredSource):
                notes = _export_stored(export, source, places, progress)
            else:
                raise ConfigError([f"{name!r} is no step"], target="eckpt export")
            export.publish()
    is_complete = not any(_LEFT_OUT in note for note in notes)
    return Exported(source.name, len(source.leaves), tuple(notes), is_complete)


def _export_ram(export: Export, source: RamSource, places: Places, progress: Progress) -> list[str]:
    like = newest_items(places)
    notes: list[str] = []
    if not export.write_ram(source, like, progress):
        notes.append(_GUESSED)
    survey = take_survey(places)
    try:
        inventory = survey.inventory(source.save.run_id)
        export.write_host_states(ram_documents(source.save, inventory, survey.folders, places))
    except (HostStateError, CorruptData) as error:
        notes.append(f"{_LEFT_OUT}: {error}")
    return notes + source.notes


def _export_stored(
    export: Export, source: StoredSource, places: Places, progress: Progress
) -> list[str]:
    marker = source.stored.marker
    step = marker.save.step if marker else source.step
    export.copy_stored(source, step, progress)
    if marker is not None:
        export.write_host_states(stored_documents(source.stored.documents, marker.digests, places))
    return []


def newest_items(places: Places) -> dict[str, epath.Path]:
    """Return the Orbax items of the newest whole step in storage by their names, or none."""
    if not places.directory:
        return {}
    survey = take_survey(dataclasses.replace(places, local_dirs=()))
    whole = [each for each in survey.stored if each.state == "whole" and each.run_id]
    if not whole:
        return {}
    (newest,) = look_at([max(whole, key=lambda each: each.step).listed], places)
    if isinstance(newest, CheckpointError) or newest.marker is None:
        return {}
    folder = epath.Path(places.directory) / newest.place.tensors
    return {name: folder / name for name in newest.marker.items}


class Export:
    """The making of one directory. ConfigError when there is something at its path already.

    A process that is killed leaves ``.<name>.eckpt-<number>`` beside it, which can be removed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        check_new(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        name = f".{directory.name}.eckpt-{secrets.token_hex(4)}"
        self._temporary = directory.parent / name
        self._temporary.mkdir()

    def __enter__(self) -> Export:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)

    def write_ram(
        self, source: RamSource, like: Mapping[str, epath.Path], progress: Progress
    ) -> bool:
        """Write a step of RAM; return True when its structure is that of the items ``like``."""
        trees, is_like = ram_trees(source, like, progress)
        to = epath.Path(self._temporary) / str(source.save.step)
        write_late_step(to, trees, {})
        _make_plain(to)
        return is_like

    def copy_stored(self, source: StoredSource, step: int, progress: Progress) -> None:
        """Copy a stored step's files, and read the copy: CorruptData where it is damaged."""
        item, to = epath.Path(source.stored.item), epath.Path(self._temporary) / str(step)
        is_itself = (item / STEP_METADATA).exists()
        try:
            _copy(item if is_itself else item.parent, to)
        except OSError as error:
            raise PersistentTierError("copy", source.name, str(error)) from error
        _make_plain(to)
        copied = source.moved(str(to if is_itself else to / item.name))
        for path, spec in copied.leaves.items():
            for box in copied.boxes(path):
                copied.read(path, box)  # decodes, and compares where there is a CRC32C
            progress(leaf_bytes(spec))

    def write_host_states(self, documents: Mapping[int, bytes]) -> None:
        """Write the payloads of the processes' documents, of which none may be missing."""
        folder = self._temporary / HOST_STATES
        folder.mkdir()
        for owner, data in documents.items():
            payload = decode_document(data).payload
            text = json.dumps(payload, indent=1)
            (folder / document_name(owner, len(documents))).write_text(f"{text}\n")

    def publish(self) -> None:
        """Give the directory its name."""
        check_new(self.directory)
        os.rename(self._temporary, self.directory)


def check_new(directory: Path) -> None:
    """Raise ConfigError when something lies at the path."""
    if os.path.lexists(directory):
        raise ConfigError([f"{directory} exists already"], target="eckpt export")


def ram_trees(
    source: RamSource, like: Mapping[str, epath.Path], progress: Progress
) -> tuple[dict[str, Any], bool]:
    """Return the trees of a RAM step's arrays by Orbax's items; True when they are like ``like``.

    RAM has the paths of leaves alone. Without ``like``, or where that has other leaves, all nodes
    are dicts, in the item ``state`` or the only one of ``like``.
    """
    values = {
        path: late_array(spec, _loader(source, path, progress), _chunk_bytes(source, path))
        for path, spec in source.leaves.items()
    }
    parts = {
        name: {
            path.removeprefix(f"{name}/"): value
            for path, value in values.items()
            if path.startswith(f"{name}/")
        }
        if len(like) > 1
        else values
        for name in like
    }
    trees = {name: tree_like(item, parts[name]) for name, item in like.items()}
    if trees and None not in trees.values() and sum(map(len, parts.values())) == len(values):
        return trees, True
    return {next(iter(like)) if len(like) == 1 else ITEM: tree_of(values)}, False


def _loader(source: RamSource, path: str, progress: Progress) -> Callable[[], Any]:
    def load() -> Any:
        array = read_leaf(source, path)
        progress(array.nbytes)
        return array

    return load


def _chunk_bytes(source: RamSource, path: str) -> int | None:
    """Return the size of a leaf's largest shard, so that a process reads little but its own."""
    spec, boxes = source.leaves[path], source.boxes(path)
    if len(boxes) < 2 or leaf_bytes(spec) < _CHUNKED_BYTES:
        return None
    return max(leaf_bytes(msgspec.structs.replace(spec, global_shape=_shape(b))) for b in boxes)


def _shape(box: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _copy(folder: epath.Path, to: epath.Path) -> None:
    to.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_dir():
            _copy(path, to / path.name)
            continue
        with path.open("rb") as source, (to / path.name).open("wb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)


def _make_plain(step: epath.Path) -> None:
    """Take out of a step's documents what ties it to the job: our mark, and the job's devices."""
    with _edited(step / STEP_METADATA) as fields:
        (fields.get("custom_metadata") or {}).pop(OURS, None)
    for item in (step, *(path for path in step.iterdir() if path.is_dir())):
        (item / SHARDINGS).unlink(missing_ok=True)
        with _edited(item / TREE) as fields:
            for leaf in fields.get("tree_metadata", {}).values():
                # Plain Orbax puts an array of JAX onto the devices that it was saved on, if no
                # others are given, and nowhere else.
                if leaf["value_metadata"]["value_type"] == JAX_ARRAY:
                    leaf["value_metadata"]["value_type"] = NUMPY_ARRAY


@contextlib.contextmanager
def _edited(document: epath.Path) -> Generator[dict[str, Any]]:
    """Give the fields of a JSON document of Orbax, and write them back; {} where there is none.

    CorruptData where the document has other fields than Orbax writes.
    """
    exists = document.exists()
    try:
        fields = json.loads(document.read_bytes()) if exists else {}
        yield fields
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise CorruptData("read", str(document), f"not Orbax's metadata: {error}") from error
    if exists:
        document.write_text(json.dumps(fields))
