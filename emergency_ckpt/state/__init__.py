"""The training state between devices and host memory.

``tree`` describes a pytree as leaves, boxes and processes. ``snapshot`` tells at each save whether
this still holds, and copies it off the devices, ``materialize`` puts restored bytes back, and
``host_state`` encodes the non-tensor state.

A snapshot:

1. On CPU it consists of views. They share the arrays' buffers, which survive a donation, so the
   training thread does not wait; the next step must then write to fresh memory
   (``snapshot_mode="wait"`` waits instead until the bytes are in the slot).
2. On GPU and TPU it consists of transfers, which ``core.save.snapshot_plan`` chooses once for a
   structure of state. If several devices hold a shard, each sends an equal part; devices alternate.
3. Transfers go to pinned host memory where JAX has it, all in one ``device_put``. JAX's own way to
   numpy passes through pageable memory or a small buffer and is several times slower (jax-ml/jax
   issue 21438, pull request 22114).
4. At most ``Buffers.staging_bytes`` are between the devices and the memory that keeps them: a slot,
   or for storage an area that is used again (``save.persistent.capture``). The background
   thread copies arrived bytes with CRC and starts the transfers that then have room.
5. A step that is due in both tiers is captured once (``SlotCapture``): the local save reads the
   snapshot and pins its slot (``pins``) for the persistent save, which reads what no slot has.

Guaranteed: when ``save`` returns, the state may be donated. ``jax.transfer_guard`` refuses none of
these transfers: the user has asked for them.

- "wait": all transfers have ended. With a small staging memory the copy, not the link, may limit
  the speed.
- "device_copy": leaves within ``device_copy_bytes`` of each device were copied there by one program
  that runs between the steps; training waits only for leaves that do not fit. While another save's
  copies use the budget, or the device has no memory, it waits for all. The choice of leaves never
  changes, because another choice would be another program to compile.
- When the background thread of a local save must wait for other processes, all transfers start at
  once whatever the staging memory, and training waits for them alone.

A failed transfer fails the save. Transfers that JAX makes itself (types of less than a byte; no
pinned memory) are read before training continues, because a donated array cannot be read any more.

Pinned memory is written again when its reader says that it has ended, or when no view of it is
alive: a write to storage that was given up may still read.

Not guaranteed: a staging limit when the background thread waits for others.
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
