"""The training state between devices and host memory.

``tree`` describes a pytree as leaves, boxes and processes. ``snapshot`` tells at each save whether
this still holds, and copies it off the devices, ``materialize`` puts restored bytes back, and
``host_state`` encodes the non-tensor state.

A snapshot:

1. On CPU it consists of views. They share the arrays' buffers, which survive a donation, so the
   training thread does not wait; the next step must then write to fresh memory.
2. On GPU and TPU leaves that fit into free device memory (``DeviceCopies``) are copied there by one
   program that runs between the steps, and ``save`` returns. The training thread waits for the
   others. ``core.save.snapshot_plan`` chooses once for a structure of state; if several devices
   hold a shard, each sends an equal part; devices alternate.
3. Bytes leave the devices by the way that ``link`` found: straight into the memory that keeps them,
   where it is mapped for DMA, else by JAX's own transfers to pinned or pageable memory.
4. At most ``Buffers.staging_bytes`` are in flight, whoever waits for whom: larger shards move in
   pieces, and each piece is let go before more are started. The background thread computes the
   CRC of what has arrived while more is on its way.
5. A step that is due in both tiers is captured once (``SlotCapture``): the local save reads the
   snapshot and pins its slot (``pins``) for the persistent save, which reads what no slot has.

Guaranteed: when ``save`` returns, the state may be donated. ``jax.transfer_guard`` refuses none of
these transfers: the user has asked for them.

While another save's copies use the budget, or the device has no memory, training waits for all.
Where the reader must first wait for other processes, training waits with it for what was not
copied. A failed transfer fails the save, with the name of the device. Nothing is known of a leaf in
host memory (offloaded) but its whole: one that is larger than the bound goes alone.

Pinned memory is written again when its reader says that it has ended, or when no view of it is
alive: a write to storage that was given up may still read.
"""

from typing import TYPE_CHECKING

from emergency_ckpt.faces import face_of

if TYPE_CHECKING:
    from emergency_ckpt.state.dtypes import dtype_named
    from emergency_ckpt.state.snapshot import SnapshotRecipe
    from emergency_ckpt.state.staging import HostShard, Snapshot
    from emergency_ckpt.state.tree import BoxTable, StateTree, describe

__all__ = [
    "BoxTable",
    "HostShard",
    "Snapshot",
    "SnapshotRecipe",
    "StateTree",
    "describe",
    "dtype_named",
]

__getattr__ = face_of(
    __name__,
    {
        "describe": "tree",
        "StateTree": "tree",
        "BoxTable": "tree",
        "SnapshotRecipe": "snapshot",
        "Snapshot": "staging",
        "HostShard": "staging",
        "dtype_named": "dtypes",
    },
)
