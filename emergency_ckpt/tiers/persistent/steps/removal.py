"""The whole steps of a persistent directory, for a preservation policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from etils import epath

from emergency_ckpt.core.limits import MAX_METRICS_BYTES
from emergency_ckpt.core.restore.inventory import PersistentStep
from emergency_ckpt.core.save.retention import StepRecord
from emergency_ckpt.errors import PersistentTierError
from emergency_ckpt.tiers.persistent.marker import HOST_STATE, MARKER_NAME
from emergency_ckpt.tiers.persistent.steps.replaced import StepPlace
from emergency_ckpt.tiers.persistent.tier import PersistentTier
from emergency_ckpt.tiers.storage.directory import read_at_most

_METRICS = "metrics.json"


class StepRecords:
    """The whole steps of one directory. For one process at a time.

    Blocks for storage, until the tier's deadlines.
    """

    def __init__(self, tier: PersistentTier) -> None:
        self._tier = tier
        self._directory = epath.Path(tier.directory)

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write ``metrics`` (JSON values) for the preservation policy, before the marker."""
        data = json.dumps(dict(metrics)).encode()
        if len(data) > MAX_METRICS_BYTES:
            raise self._error("write metrics of", step, f"{len(data)} bytes are too many")
        self._tier.storage.put(f"{HOST_STATE}/{step}/{_METRICS}", data, step=step)

    def records(
        self, counts: Callable[[PersistentStep], bool] = lambda _: True
    ) -> list[StepRecord]:
        """Return the steps that count, oldest first, without those that plain Orbax wrote.

        ``counts``: returns False for a step to exclude that is whole by its marker.

        PersistentTierError when the directory cannot be read.
        """
        deadline_s = self._tier.storage.deadline_s(None)
        whole = self._tier.found.whole_found(deadline_s)
        return [
            self._record(found.step.step, found.place, deadline_s)
            for found in whole
            if counts(found.step)
        ]

    def record(self, step: int, deadline_s: float | None = None) -> StepRecord:
        """Return the record of one step. PersistentTierError, also when it is gone."""
        deadline_s = self._tier.storage.deadline_s(deadline_s)
        return self._record(step, self._tier.found.place_of(step, deadline_s), deadline_s)

    def _record(self, step: int, place: StepPlace, deadline_s: float) -> StepRecord:
        documents = self._directory / HOST_STATE / place.documents

        def look() -> StepRecord:
            written_s = (documents / MARKER_NAME).stat().mtime
            return StepRecord(step, float(written_s), _metrics(documents / _METRICS))

        return self._tier.storage.do("look at", f"/{step}", look, deadline_s)

    @property
    def timeout_s(self) -> float:
        """Return the maximum time of a call to storage, in seconds."""
        return self._tier.storage.timeout_s

    def remove(self, step: int) -> None:
        """Remove ``step``. After a crash at any instant it is whole or does not count."""
        self._tier.remove(step)

    def _error(self, operation: str, step: int, problem: str) -> PersistentTierError:
        return PersistentTierError(operation, f"step {step} in {self._directory}", problem)


def _metrics(path: epath.Path) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    return decode_metrics(read_at_most(path, MAX_METRICS_BYTES + 1))


def decode_metrics(data: bytes) -> Mapping[str, Any] | None:
    """Return the metrics of a step. None for anything else: the policy decides about such steps."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else None
