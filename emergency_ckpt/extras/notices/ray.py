"""The warning of Ray Train that nodes of a run will be drained."""

from __future__ import annotations

from emergency_ckpt.private_names import private_module

_RAY_CONTEXT = "ray.train.v2._internal.execution.context"


def ray_notice() -> str:
    """Return Ray Train's warning that nodes of this run will be drained; only in its workers.

    The public ``ray.train.get_preemption_info`` is a collective call: made here, it would mix with
    those of the training loop. This is the value of this worker that it would have broadcast.
    """
    train = private_module(_RAY_CONTEXT, "get_train_context", project="ray")
    info = train.get_train_context().preemption_context.preemption_info
    return "" if info is None else f"Ray: {info!s:.200}"
