"""Value types that all layers share. All are immutable and comparable.

The small ones are exempt from garbage collection: they hold numbers and names, which form no
cycles, and a large job's leader has millions of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

TierName = Literal["local", "persistent"]
"""A tier, in settings, events and metrics: the RAM of the hosts, and storage."""
LOCAL: Final = "local"
PERSISTENT: Final = "persistent"

Box = tuple[tuple[int, int], ...]
"""Half-open index ranges of a shard in its global array, one (start, stop) per dimension."""


class SaveId(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, gc=False):
    """Identity of one save. Parts are combined only when all three fields are equal.

    ``incarnation`` names the life of the job that made it, with a suffix when the save was
    forced. It begins with the life's number in twelve digits, so that saves of one step sort by
    their lives; see ``core.timeline``.
    """

    step: int
    incarnation: str
    run_id: str


class ShardId(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, gc=False):
    """A part of the state, independent of process, host, slice and mesh."""

    leaf: str
    box: Box


class LeafSpec(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, gc=False):
    """One array of the state as stored.

    Attributes:
      path: "/"-joined keys of the leaf in the state's pytree, unique in the state.
      dtype: numpy or ml_dtypes name of the stored elements, e.g. ``"bfloat16"``. int4-like types
        take one byte per element. PRNG key arrays are stored as their uint32 key data.
      global_shape: shape of the whole array (of the key data for PRNG keys).
      key_impl: name of the PRNG implementation for key arrays, else None.
    """

    path: str
    dtype: str
    global_shape: tuple[int, ...]
    key_impl: str | None = None


class ShardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The place of one shard in a slot.

    Attributes:
      leaf: index into the manifest's ``leaves``.
      box: index box in the global array.
      offset: first byte in the slot, a multiple of 64.
      nbytes: length in bytes (0 for zero-size shards).
      crc32c: CRC32C of the bytes, taken at capture.
    """

    leaf: int
    box: Box
    offset: int
    nbytes: int
    crc32c: int


class Writer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process that published a manifest. For people and tools; no decision depends on it."""

    process_index: int
    process_count: int
    slice_index: int
    hostname: str


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a manifest that is equal, byte for byte, between replicas: all but its writer.

    Attributes:
      save: identity of the save.
      leaves: every leaf of the state, sorted by path, also those without a shard here.
      shards: the shards stored here, sorted by (leaf, box).
    """

    save: SaveId
    leaves: tuple[LeafSpec, ...]
    shards: tuple[ShardEntry, ...]

    def shard_id(self, index: int) -> ShardId:
        """Return the identity of shard ``index``."""
        entry = self.shards[index]
        return ShardId(leaf=self.leaves[entry.leaf].path, box=entry.box)


Requirement = Literal["secret", "storage", "peers"]
"""Something without which a job ends its start with an error."""
OnPreemption = Literal["save", "exit", "ignore"]
"""What a job does at a notice of a preemption: "exit" saves, and then ends the process."""
HostStateRemap = Callable[[Sequence[Any], int, int], Any]
"""``remap(payloads of all saved processes, process_index, process_count) -> payload``."""

SHARD_ALIGNMENT_BYTES = 64
"""Offsets in a slot are multiples of this: XLA takes 64-byte aligned host memory without a copy."""
LARGE_SHARD_BYTES, PAGE_ALIGNMENT_BYTES = 64 << 10, 4096
"""A shard of so many bytes or more begins a page, so that a range of pages that is mapped for DMA
cuts small shards alone. The same on hosts with larger pages, since replicas must be equal."""


class OrbaxStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step in storage as readers of Orbax see it, besides its arrays. Equal on all processes.

    Attributes:
      items: names of the items with the arrays. Several: the state is a dict by them, and each has
        an item of its own; none: it is empty. None: the tier's ``orbax_item``, else ``state``.
      metrics: JSON values, also stored as Orbax's item ``metrics``; None: there are none.
      custom_metadata: JSON values for the step's metadata.
      step_name: the format of the folder's name, as its name of step 0.
    """

    items: tuple[str, ...] | None = None
    metrics: Any = None
    custom_metadata: Mapping[str, Any] = {}
    step_name: str = "0"
