"""A step as a directory of plain Orbax, published by one rename.

``<directory>/<step>/`` is the Orbax step, and ``<directory>/host_states/`` has the payload of each
process's host state as JSON (FORMAT.md), where the step has any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
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
from emergency_ckpt.storage.item.array_writes import ArrayWrites
from emergency_ckpt.storage.item.state import JAX_ARRAY, NUMPY_ARRAY, SHARDINGS, late_items
from emergency_ckpt.storage.marker import OURS
from emergency_ckpt.storage.meetings import meet_nobody, new_attempt
from emergency_ckpt.storage.orbax_names import STEP_METADATA, TREE
from emergency_ckpt.storage.step_reader import StoredStepReader
from emergency_ckpt.storage.step_writer import StepWriter
from emergency_ckpt.tier import StepReader, leaf_bytes
from emergency_ckpt.tools.offline.named_steps import find_step
from emergency_ckpt.tools.survey.places import Places
from emergency_ckpt.types import OrbaxStep
from emergency_ckpt.work_progress import WorkProgress

HOST_STATES = "host_states"
_LEFT_OUT = "the host states are left out"
_GUESSED = (
    "RAM has no structure of the state but the paths of its leaves: all its nodes are dicts (give"
    " a --dir with a step of the same leaves for the structure)"
)
_COPY_BYTES = 16 << 20
_BATCH_BYTES = 256 << 20

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
    notes: list[str] = []
    with contextlib.closing(find_step(name, places)) as step:
        size_bytes = sum(map(leaf_bytes, step.leaves.values()))
        with Export(directory) as export, shown("export", size_bytes) as progress:
            if isinstance(step, StoredStepReader):
                export.copy_files(step, progress)
            elif not export.write_arrays(step, _structure(places, notes), progress):
                notes.append(_GUESSED)
            try:
                export.write_host_states(step.host_states())
            except HostStateError as error:  # of RAM: its tensors may be whole without them
                notes.append(f"{_LEFT_OUT}: {error}")
            export.publish()
    is_complete = not any(_LEFT_OUT in note for note in notes)
    return Exported(step.name, len(step.leaves), (*notes, *step.notes), is_complete)


def _structure(places: Places, notes: list[str]) -> dict[str, epath.Path | None]:
    """Return items with the structure of the state; note why storage cannot be asked for one."""
    try:
        return places.storage().newest_items() if places.directory else {}
    except CheckpointError as error:
        notes.append(str(error))
        return {}


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

    def write_arrays(
        self, step: StepReader, like: Mapping[str, epath.Path | None], progress: Progress
    ) -> bool:
        """Write a step array by array; return True when its structure is that of ``like``."""
        states, is_like = late_items(step, like, progress)
        into = epath.Path(self._temporary) / str(step.save.step)
        writes = ArrayWrites(
            attempt=new_attempt(),
            creates=True,
            at_once_bytes=_BATCH_BYTES,
            compression="none",
            progress=WorkProgress.until(math.inf),
        )
        orbax = OrbaxStep(items=tuple(states))
        StepWriter(into, step.save, states, (0,), writes, orbax=orbax, meet=meet_nobody).write()
        _make_plain(into)
        return is_like

    def copy_files(self, step: StoredStepReader, progress: Progress) -> None:
        """Copy a stored step's files, and read the copy: CorruptData where it is damaged."""
        item, to = epath.Path(step.arrays()[0]), self._temporary / str(step.save.step)
        is_itself = (item / STEP_METADATA).exists()
        try:
            _copy(item if is_itself else item.parent, epath.Path(to))
        except OSError as error:
            raise PersistentTierError("copy", step.name, str(error)) from error
        _make_plain(epath.Path(to))
        copied = step.moved(str(to if is_itself else to / item.name))
        for path, spec in copied.leaves.items():
            for box in copied.boxes(path):
                copied.read(path, box)  # decodes, and compares where there is a CRC32C
            progress(leaf_bytes(spec))

    def write_host_states(self, documents: Mapping[int, bytes]) -> None:
        """Write the payloads of the processes' documents, if there are any."""
        if not documents:
            return
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
