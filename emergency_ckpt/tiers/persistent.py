"""Persistent tier: one sharded copy in Orbax's own format, and the host states beside it.

``<dir>/<step>/`` is an ordinary Orbax step (item ``default``, StandardSave), written by the
processes of the primary slice only. ``<dir>/host_state/<step>/`` has one JSON document for each
process and ``marker.json``, written last. A step counts when Orbax's commit marker and ours are
both there. FORMAT.md beside this file specifies the second.

This module and ``orbax_writing`` are the only ones that use Orbax for storage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp
import tensorstore
from absl import logging
from etils import epath

from emergency_ckpt.core.inventory import PersistentStep
from emergency_ckpt.errors import CheckpointError, CorruptData, InvalidState, PersistentTierError
from emergency_ckpt.tiers.dtypes import dtype_named
from emergency_ckpt.tiers.materialize import empty_leaf
from emergency_ckpt.tiers.orbax_writing import as_arrays, writing_handler
from emergency_ckpt.tiers.state_tree import LeafKind, PyTree, StateTree, boxes_by_device
from emergency_ckpt.types import LeafSpec, SaveId, ShardId

_ITEM = "default"
_MARKER_VERSION = 1
_MARKER_LIMIT_BYTES = 64 << 20
_HOST_STATE = "host_state"


class StepMarker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``marker.json``: says that the host states of a persistent step are all there.

    Attributes:
      digests: SHA-256 (hex) of each process's document, by process index.
      empty: per process, whether its host state is null.
      leaves: every leaf of the state; Orbax cannot hold zero-size arrays, so these live here only.
    """

    format: int
    save: SaveId
    digests: tuple[str, ...]
    empty: tuple[bool, ...]
    leaves: tuple[LeafSpec, ...]


class PersistentTier:
    """Reads and writes one directory. All methods block for storage.

    None is collective but ``write_tensors``, over its ``writers``.
    """

    def __init__(self, directory: str, *, keep_last_n: int | None = None) -> None:
        self._directory = epath.Path(directory)
        self._keep_last_n = keep_last_n

    @property
    def directory(self) -> str:
        """Where the tier lives."""
        return str(self._directory)

    def create(self) -> None:
        """Make the directory; PersistentTierError when that is impossible."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._error("create", "", error) from error

    def steps(self) -> list[PersistentStep]:
        """Steps that carry both markers, oldest first; PersistentTierError when unreadable."""
        found: list[PersistentStep] = []
        try:
            if not self._directory.exists():
                return []
            committed = set(ocp.utils.checkpoint_steps(self._directory))
        except (OSError, ValueError) as error:
            raise self._error("list", "", error) from error
        for step in sorted(committed):
            marker = self._marker_or_none(step)
            if marker is not None:
                found.append(PersistentStep(step, len(marker.digests), not all(marker.empty)))
        return found

    def _marker_or_none(self, step: int) -> StepMarker | None:
        try:
            return self.marker(step)
        except CorruptData as error:
            logging.warning("%s; the step does not count", error)
            return None
        except PersistentTierError as error:
            # Absent means not saved whole. Unreadable does not: then an older step must not be
            # taken for the newest.
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            raise

    def marker(self, step: int) -> StepMarker:
        """The host-state marker of ``step``; PersistentTierError without one."""
        path = self._host_state_dir(step) / "marker.json"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise self._error("read", f"/{_HOST_STATE}/{step}/marker.json", error) from error
        try:
            if len(data) > _MARKER_LIMIT_BYTES:
                raise CorruptData("decode", str(path), "the marker is too large")
            marker = msgspec.json.decode(data, type=StepMarker)
        except msgspec.DecodeError as error:
            raise CorruptData("decode", str(path), f"no marker: {error}") from error
        if marker.format != _MARKER_VERSION:
            raise CorruptData(
                "decode",
                str(path),
                "unknown version of the marker",
                expected=_MARKER_VERSION,
                actual=marker.format,
            )
        if marker.save.step != step or len(marker.empty) != len(marker.digests):
            raise CorruptData("decode", str(path), "the marker contradicts itself")
        return marker

    def write_tensors(
        self,
        save: SaveId,
        tree: StateTree,
        views: Mapping[ShardId, npt.NDArray[Any]],
        writers: Sequence[int],
    ) -> None:
        """Write the state of ``views`` as Orbax's step. Collective over ``writers``; blocks.

        A whole step of the same number that an earlier life left is replaced: the run went back
        behind it.
        """
        state = as_arrays(tree, views, writers)
        together = ocp.options.MultiprocessingOptions(
            primary_host=writers[0],
            active_processes=set(writers),
            barrier_sync_key_prefix=f"eckpt-{save.incarnation}",
        )
        options = ocp.CheckpointManagerOptions(
            create=False,
            max_to_keep=self._keep_last_n,
            cleanup_tmp_directories=False,
            enable_async_checkpointing=False,
            multiprocessing_options=together,
        )
        handler = writing_handler(together, writers)
        try:
            with ocp.CheckpointManager(
                self._directory, options=options, item_handlers=handler
            ) as manager:
                manager.save(save.step, args=ocp.args.PyTreeSave(state), force=True)
                manager.wait_until_finished()
        except CheckpointError:
            raise
        except Exception as error:  # Orbax raises whatever lies below it
            raise self._error("save", f"/{save.step}", error) from error

    def clear_step(self, step: int) -> None:
        """Remove what is left of ``step``: marker first, so that it is never half visible."""
        try:
            marker = self._host_state_dir(step) / "marker.json"
            marker.unlink(missing_ok=True)
            for path in (self._host_state_dir(step), self._directory / str(step)):
                if path.exists():
                    path.rmtree()
            for path in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                path.rmtree()
        except OSError as error:
            raise self._error("clear", f"/{step}", error) from error

    def write_host_state(self, step: int, owner: int, count: int, data: bytes) -> None:
        """Write one process's document. It counts only once the marker is there."""
        try:
            directory = self._host_state_dir(step)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / host_state_name(owner, count)).write_bytes(data)
        except OSError as error:
            raise self._error("save", f"/{_HOST_STATE}/{step}", error) from error

    def publish(
        self, save: SaveId, documents: Mapping[int, tuple[str, bool]], leaves: Sequence[LeafSpec]
    ) -> None:
        """Write the marker: ``documents`` has (digest, empty) of every process's document."""
        order = range(len(documents))
        marker = StepMarker(
            format=_MARKER_VERSION,
            save=save,
            digests=tuple(documents[i][0] for i in order),
            empty=tuple(documents[i][1] for i in order),
            leaves=tuple(leaves),
        )
        directory = self._host_state_dir(save.step)
        try:
            temporary = directory / "marker.json.tmp"
            temporary.write_bytes(msgspec.json.encode(marker))
            temporary.rename(directory / "marker.json")
            self._forget_removed_steps()
        except OSError as error:
            raise self._error("publish", f"/{save.step}", error) from error

    def _forget_removed_steps(self) -> None:
        """Host states of steps that Orbax has removed by ``keep_last_n``."""
        kept = set(ocp.utils.checkpoint_steps(self._directory))
        for path in (self._directory / _HOST_STATE).iterdir():
            if path.name.isdecimal() and int(path.name) not in kept:
                path.rmtree()

    def read_host_state(self, step: int, owner: int) -> bytes:
        """One process's document, checked against the marker."""
        marker = self.marker(step)
        count = len(marker.digests)
        path = self._host_state_dir(step) / host_state_name(owner, count)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise self._error("read", f"/{_HOST_STATE}/{step}/{path.name}", error) from error
        digest = hashlib.sha256(data).hexdigest()
        if digest != marker.digests[owner]:
            raise CorruptData(
                "read",
                str(path),
                "the document is not the one that was saved",
                expected=marker.digests[owner],
                actual=digest,
            )
        return data

    def read_tensors(self, step: int, tree: StateTree, like: PyTree) -> tuple[PyTree, int]:
        """The state of ``step`` on the devices, and the bytes that this process read for it.

        Each process reads its own shards and waits for no other.
        """
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={me}, barrier_sync_key_prefix=f"eckpt-read-{me}"
        )
        handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
        try:
            with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
                restored = checkpointer.restore(
                    self._directory / str(step) / _ITEM,
                    args=ocp.args.StandardRestore(_abstract(tree, like)),
                )
        except Exception as error:  # Orbax raises whatever lies below it
            raise self._error("restore", f"/{step}", error) from error
        return _as_given(tree, like, restored), _bytes_here(tree)

    def _host_state_dir(self, step: int) -> epath.Path:
        return self._directory / _HOST_STATE / str(step)

    def _error(self, operation: str, below: str, error: Exception) -> PersistentTierError:
        text = str(error).split("\n", maxsplit=1)[0][:500]
        return PersistentTierError(
            operation,
            f"{self._directory}{below}",
            f"{type(error).__name__}: {text}",
            hint="check that the directory is reachable and writable",
        )


def check_storable(tree: StateTree) -> None:
    """InvalidState for a leaf whose dtype the storage format of Orbax does not have."""
    for leaf in tree.leaves:
        try:
            tensorstore.dtype(leaf.spec.dtype)
        except ValueError as error:
            raise InvalidState(
                "save",
                f"leaf {leaf.spec.path!r}",
                f"the persistent tier cannot store dtype {leaf.spec.dtype}",
                hint="store it as another dtype, or use the local tier only",
            ) from error


def host_state_name(owner: int, count: int) -> str:
    """File name of a process's host-state document."""
    return f"process_{owner:05d}_of_{count:05d}.json"


def _abstract(tree: StateTree, like: PyTree) -> PyTree:
    flat = jax.tree_util.tree_leaves(like)
    values: dict[str, object] = {}
    for leaf in tree.leaves:
        value = flat[leaf.position]
        if 0 in leaf.spec.global_shape:
            values[leaf.spec.path] = None
        elif leaf.kind is LeafKind.SCALAR:
            values[leaf.spec.path] = value
        elif leaf.kind is LeafKind.NUMPY:
            values[leaf.spec.path] = np.empty(leaf.spec.global_shape, dtype_named(leaf.spec.dtype))
        else:
            values[leaf.spec.path] = jax.ShapeDtypeStruct(
                tuple(value.shape), value.dtype, sharding=leaf.sharding
            )
    return tree.unflatten(values)


def _as_given(tree: StateTree, like: PyTree, restored: PyTree) -> PyTree:
    """Give host leaves the caller's types, and put back the zero-size leaves Orbax cannot hold."""
    found = iter(jax.tree_util.tree_leaves(restored))
    flat = jax.tree_util.tree_leaves(like)
    values: dict[str, object] = {}
    for leaf in sorted(tree.leaves, key=lambda leaf: leaf.position):
        given = flat[leaf.position]
        if 0 in leaf.spec.global_shape:
            values[leaf.spec.path] = empty_leaf(leaf, given)
            continue
        value = next(found)
        if leaf.kind is LeafKind.NUMPY and isinstance(given, np.generic):
            value = value[()]
        values[leaf.spec.path] = value
    return tree.unflatten(values)


def _bytes_here(tree: StateTree) -> int:
    total = 0
    for leaf in tree.leaves:
        mine = {
            box
            for device, box in boxes_by_device(leaf).items()
            if device.process_index == jax.process_index()
        }
        itemsize = dtype_named(leaf.spec.dtype).itemsize
        total += sum(itemsize * int(np.prod([b - a for a, b in box])) for box in mine)
    return total
