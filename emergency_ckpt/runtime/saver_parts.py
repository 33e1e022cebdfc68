"""What the saver works with, and the settings that it asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from emergency_ckpt.runtime import save_recipe
from emergency_ckpt.runtime.coordination import Coordinator
from emergency_ckpt.runtime.events import EventSink
from emergency_ckpt.runtime.holdings import HostStateInbox
from emergency_ckpt.runtime.local_saves import LocalSaves
from emergency_ckpt.runtime.persistent_saves import PersistentSaves
from emergency_ckpt.runtime.preemption import PreemptionWatch
from emergency_ckpt.runtime.preservation import Preservation
from emergency_ckpt.runtime.worker import Failures
from emergency_ckpt.tiers.local import LocalTier


class Settings(save_recipe.Settings, Protocol):
    """The part of the config that decides how saves are carried out."""

    @property
    def restore_timeout_s(self) -> float: ...
    @property
    def save_timeout_s(self) -> float: ...
    @property
    def persistent_timeout_s(self) -> float: ...
    @property
    def storage_wait_timeout_s(self) -> float: ...
    @property
    def async_save(self) -> bool: ...
    @property
    def save_niceness(self) -> int: ...
    @property
    def save_on_preemption(self) -> bool: ...
    @property
    def exit_on_preemption(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class SaverParts:
    """What the saver works with. ``persistent`` and ``preservation``: None without that tier.

    Attributes:
      inbox: what others push for the persistent saves of this process.
      before_save: called when a save of a step starts; gives what its background part does first,
        if anything.
    """

    settings: Settings
    process: tuple[int, int]
    run_id: str
    coordinator: Coordinator
    tier: LocalTier
    local: LocalSaves
    persistent: PersistentSaves | None
    preservation: Preservation | None
    watch: PreemptionWatch
    events: EventSink
    failures: Failures
    inbox: HostStateInbox
    before_save: Callable[[int], Callable[[], object] | None]
