"""The places that a person named to be surveyed, and what a survey says of each step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from emergency_ckpt.errors import CheckpointError
from emergency_ckpt.types import SaveId, TierName

if TYPE_CHECKING:
    from emergency_ckpt.storage.tier import PersistentTier

_BUFFER_BYTES = 1 << 30


class SurveyFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that is damaged, absent or could not be read.

    Attributes:
      where: path of the file or directory.
      problem: what is wrong, for people.
      step: the step that it belongs to, where that is known.
      hint: a possible remedy.
    """

    where: str
    problem: str
    step: int | None = None
    hint: str = ""

    @classmethod
    def of(cls, where: str, error: Exception, step: int | None = None) -> SurveyFault:
        """Return the fault that ``error`` tells."""
        if isinstance(error, CheckpointError):
            text = str(error).removesuffix(f"; {error.hint}") if error.hint else str(error)
            return cls(where, text, step, error.hint)
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return cls(where, text, step)


SaveState = Literal["whole", "incomplete", "rolled_back", "damaged"]
"""``whole``: a restore from these places may take it. ``incomplete``: parts are not here.
``rolled_back``: the job continued from an earlier step. ``damaged``: it is there and unusable."""


class SurveyedStep(msgspec.Struct, frozen=True):
    """One save in one tier, as ``eckpt ls --json`` prints it.

    Attributes:
      run_id: empty for a step of plain Orbax, and for a damaged one.
      reason: why it is not whole.
      saved_s: Unix time of its newest part; null when it is not known.
      age_s: seconds since then.
      size_bytes: bytes of the whole state; null when only Orbax knows.
      held_bytes: bytes of its shards on these ramdisks, copies included; null in storage.
      processes: number of processes that saved it; null when it is not known.
      holders: the process directories with a part of it; empty in storage.
      lives: so many in a row began from it, and ended before a newer save was complete, or run.
    """

    tier: TierName
    step: int
    run_id: str
    incarnation: str
    state: SaveState
    reason: str
    saved_s: float | None
    age_s: float | None
    size_bytes: int | None
    held_bytes: int | None
    processes: int | None
    holders: tuple[str, ...]
    lives: int = 0

    @property
    def save(self) -> SaveId:
        """Return its identity."""
        return SaveId(self.step, self.incarnation, self.run_id)


@dataclasses.dataclass(frozen=True)
class Places:
    """Ramdisks, and one directory or URL of the persistent tier.

    Attributes:
      directory: of the persistent tier; empty for none.
      run_id: only this run; None: all runs.
      secret: the run's secret, with which peers are asked; None: they are not.
      owner_uid: the user whose ramdisks they are; None: the effective user.
      timeout_s: maximum time in seconds for one call to storage.
    """

    local_dirs: tuple[Path, ...] = ()
    directory: str = ""
    run_id: str | None = None
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    owner_uid: int | None = None
    timeout_s: float = 60.0

    def storage(self, timeout_s: float | None = None) -> PersistentTier:
        """Return the persistent tier of ``directory``."""
        # The launcher names places, and loads no numpy.
        from emergency_ckpt.storage.tier import PersistentTier  # noqa: PLC0415

        return PersistentTier(
            self.directory,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            buffer_bytes=_BUFFER_BYTES,
        )
