"""The places that a person named to be surveyed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from emergency_ckpt.errors import CheckpointError

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
            return cls(where, _without_hint(error), step, error.hint)
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return cls(where, text, step)


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


def _without_hint(error: CheckpointError) -> str:
    text = str(error)
    return text.removesuffix(f"; {error.hint}") if error.hint else text
