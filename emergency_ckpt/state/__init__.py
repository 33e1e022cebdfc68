"""The training state on its way between devices and host memory.

``tree`` describes a pytree as leaves, boxes and processes. ``snapshot`` takes it off the devices,
``materialize`` puts restored bytes back, and ``host_state`` encodes what is not an array.

A snapshot:

1. On CPU it is views. They share the arrays' buffers, which outlive a donation, so the training
   thread waits for nothing; the next step must then write to fresh memory (``snapshot_mode="wait"``
   waits instead until the bytes are in the slot).
2. On GPU and TPU it is transfers, which ``core.save.snapshot_plan`` chooses once for a structure of
   state. Where a shard lies on several devices, each transfers an equal part, and devices take
   turns.
3. Transfers go to pinned host memory where JAX has it, all in one ``device_put``. JAX's own way to
   numpy passes through pageable memory or a small buffer and is several times slower (jax-ml/jax
   issue 21438, pull request 22114).
4. At most ``staging_bytes`` lie between device and slot. The background thread copies with CRC what
   has arrived and starts what then has room.

When ``save`` returns, the state may be donated:

- "wait": all transfers have ended. With a small staging memory the copy, not the link, may set the
  pace.
- "device_copy": leaves within ``device_copy_bytes`` of each device were copied there by one program
  that runs between the steps; training waits only for leaves that do not fit. While another save's
  copies hold the budget, or the device has no memory, it waits for all. The choice of leaves never
  changes, because another choice would be another program to compile.
- When the background thread must wait for other processes, or for storage, all transfers start at
  once whatever the staging memory, and training waits for them alone.

A transfer that fails, fails the save. One that JAX makes itself (types of less than a byte; no
pinned memory) is read before training goes on, because a donated array cannot be read any more.
"""
