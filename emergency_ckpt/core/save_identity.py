"""Bounds of a save's identity, for every document that names one. Pure."""

from __future__ import annotations

from emergency_ckpt.core.limits import MAX_STEP, NAME_PATTERN
from emergency_ckpt.errors import CorruptData
from emergency_ckpt.types import SaveId

_BRIEF_CHARS = 200


def check_save(save: SaveId) -> None:
    """Raise ``CorruptData`` unless the step and both names of ``save`` are in bounds."""
    if not 0 <= save.step <= MAX_STEP:
        problem, actual = "step out of bounds", _number(save.step)
    elif not NAME_PATTERN.fullmatch(save.run_id):
        problem, actual = "run id is not a plain name", save.run_id
    elif not NAME_PATTERN.fullmatch(save.incarnation):
        problem, actual = "incarnation is not a plain name", save.incarnation
    else:
        return
    raise CorruptData("decode", "identity of a save", problem, actual=actual[:_BRIEF_CHARS])


def _number(value: int) -> str:
    try:
        return str(value)
    except ValueError:  # beyond the interpreter's limit for printing
        return "a number too long to print"
