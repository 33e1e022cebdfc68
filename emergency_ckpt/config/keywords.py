"""The settings as keywords, for type checkers; tests/support/settings_page.py writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Sequence

    import jax

    from emergency_ckpt.config.policies import PreservationPolicy, SaveEvery
    from emergency_ckpt.core.placement import PlacementPolicy
    from emergency_ckpt.core.save.save_rules import NonFinite
    from emergency_ckpt.core.save.snapshot_plan import DeviceReads
    from emergency_ckpt.observer import OnEvent
    from emergency_ckpt.types import HostStateRemap, OnPreemption, Requirement


class Settings(TypedDict, total=False):
    """Keywords of ``EmergencyCheckpointer`` and ``Config.set``; ``Config`` has the meanings."""

    dir: os.PathLike[str] | str | None
    local_dir: os.PathLike[str] | str
    replica_axis: str | int | None
    local_save_every: SaveEvery
    save_every: SaveEvery
    mesh: jax.sharding.Mesh | None
    run_id: str | None
    local_keep_last_n: int
    keep_last_n: int | None
    keep_every_n_steps: int | None
    preservation_policy: PreservationPolicy | None
    async_save: bool
    on_preemption: OnPreemption
    preemption_grace_s: float
    placement: str | PlacementPolicy
    host_state_remap: HostStateRemap | None
    non_finite: NonFinite
    require: Collection[Requirement]
    bind_host: str | None
    bind_port: int
    secret_file: os.PathLike[str] | str | None
    device_copy_bytes: int | None
    device_reads: DeviceReads
    stall_timeout_s: float
    total_timeout_s: float
    on_event: OnEvent | Sequence[OnEvent] | None
