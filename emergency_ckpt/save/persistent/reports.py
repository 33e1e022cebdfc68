"""Reports of the writers of a persistent save on each stage, and the answer to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from emergency_ckpt.cluster.messages import decode_message
from emergency_ckpt.core.limits import MAX_METRICS_BYTES
from emergency_ckpt.errors import CheckpointError, PersistentTierError, SaveFailed
from emergency_ckpt.types import ShardId


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str
    empty: bool


class Crc(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    shard: ShardId
    crc32c: int


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Documents that one writer has stored, and the CRCs of its part of the tensors."""

    documents: dict[int, Document] = {}
    crcs: tuple[Crc, ...] = ()


class StageReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Report of one writer on one stage.

    The first writer's answer to all of them is one too, with the first failure or none.

    ``kept``: of the first writer, that storage has the step already. ``attempt``: of the first
    writer, the name of this attempt. ``pauses``: the error is a pause after failed saves.
    """

    error: str = ""
    pauses: bool = False
    written: Written = Written()
    kept: bool = False
    attempt: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,16}\Z")] = ""

    def named(self, process: int) -> StageReport:
        """Return the answer that tells of this failure, of ``process``."""
        return StageReport(f"process {process} failed: {self.error}", self.pauses)


class SavePaused(PersistentTierError):
    """The first writer leaves this save out, after others have failed, and so nobody saves."""


def raise_failure(report: StageReport, step: int) -> None:
    """Raise PersistentTierError, or SavePaused, when ``report`` is of a failure."""
    if report.error:
        kind = SavePaused if report.pauses else PersistentTierError
        raise kind("save", f"step {step}", report.error)


def report_of(data: bytes, stage: str, step: int, writer: int) -> StageReport:
    """Return what ``writer`` says of ``stage``. CoordinationError: it cannot be decoded."""
    return decode_message(data, StageReport, f"{stage} of step {step}, process {writer}")


def agreed_crcs(every: Sequence[Written]) -> tuple[dict[ShardId, int], list[ShardId]]:
    """One CRC for each box; and the boxes whose copies differ.

    Those have none: which copy Orbax took is unknown.
    """
    found: dict[ShardId, int] = {}
    differing: set[ShardId] = set()
    for part in every:
        for each in part.crcs:
            if found.setdefault(each.shard, each.crc32c) != each.crc32c:
                differing.add(each.shard)
    for shard in differing:
        del found[shard]
    return found, sorted(differing)


def checked_metrics(metrics: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return ``metrics``, which every version of the step log has. SaveFailed when too large."""
    size = 0 if metrics is None else len(msgspec.json.encode(metrics))
    if size > MAX_METRICS_BYTES:
        problem = f"{size} bytes are too many (at most {MAX_METRICS_BYTES})"
        raise SaveFailed("write", "metrics", problem)
    return metrics


def text_of(error: Exception) -> str:
    """Never empty: to the others an empty text means that all went well."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
