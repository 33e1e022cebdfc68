"""``CheckpointLog``: saves and restores as entries of Orbax's checkpoint logger.

ml-goodput-measurement reads these entries and counts the time that checkpoints cost training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from emergency_ckpt.events import Event
from emergency_ckpt.metrics.background_listener import BackgroundListener


class EntryLogger(Protocol):
    """Orbax's loggers, such as its ``CloudLogger``."""

    def log_entry(self, entry: Any, /) -> None:
        """Write one entry."""
        ...


class CheckpointLog(BackgroundListener):
    """A listener (``on_event``) that passes each save and restore of this process to a logger.

    A save is an entry when training goes on after it, a restore when it has finished. One from RAM
    is an ``emergency_restore``. The logger is called in a thread of this object.

    Args:
      dir, local_dir: as of the config: the calculator tells the tiers apart by ``gs://``.
    """

    def __init__(self, logger: EntryLogger, *, dir: str | None, local_dir: str) -> None:
        self._logger = logger
        self._directories = {"persistent": dir or "", "local": local_dir}
        super().__init__("checkpoint log")

    def take(self, event: Event) -> None:
        """Write the entry of one event, if it has one."""
        if event.name in ("save.captured", "restore.finished"):
            directory = self._directories[str(event.fields["tier"])]
            fields: Mapping[str, Any] = event.fields
            make = _save_entry if event.name == "save.captured" else _restore_entry
            self._logger.log_entry(make(fields, event.time_s, directory))


def _save_entry(fields: Mapping[str, Any], time_s: float, directory: str) -> dict[str, Any]:
    seconds, waited = fields["seconds"], fields["waited_seconds"]
    start_s = time_s - seconds
    return {
        "step": fields["step"],
        "event_type": "save",
        "directory": directory,
        "reached_preemption": False,
        "synchronous": False,
        "wait_for_prev_start_time": start_s,
        "wait_for_prev_duration_secs": waited,
        "checkpointer_blocking_start_time": start_s + waited,
        "checkpointer_blocking_duration_secs": seconds - waited,
        "get_old_steps_start_time": time_s,
        "get_old_steps_duration_secs": 0.0,
        "checkpoint_manager_blocking_start_time": start_s,
        "checkpoint_manager_blocking_duration_secs": seconds,
    }


def _restore_entry(fields: Mapping[str, Any], time_s: float, directory: str) -> dict[str, Any]:
    seconds = fields["seconds"]
    entry: dict[str, Any] = {
        "step": fields["step"],
        "event_type": "restore" if fields["tier"] == "persistent" else "emergency_restore",
        "directory": directory,
        "checkpointer_start_time": time_s - seconds,
        "checkpointer_duration_secs": seconds,
        "checkpoint_manager_start_time": time_s - seconds,
        "checkpoint_manager_duration_secs": seconds,
    }
    if fields["tier"] != "persistent":
        entry |= {"broadcast_start_time": time_s, "broadcast_duration_secs": 0.0}
    return entry
