"""Rows of the table of settings. Validation, agreement, the page and axlearn's face read them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from types import NoneType
from typing import Any, Final, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from emergency_ckpt.core.limits import MAX_SETTING_CHARS

LONGEST_TIME_S: Final = 1e7
NO_SETTING: Final = {"is_setting": False}
"""Metadata of a field that has no row in the table."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One row: a setting, and every trait that is checked, compared or documented.

    Attributes:
      kind: type of its values, without None; ``annotation`` is that of the field, as text.
      is_optional: None is a value too.
      may_differ: the value may differ between processes; all other settings must be equal.
      least, most: of a number; of a text its length. A number of seconds is above zero, other
        numbers are at least 0.
      basic: a setting of most jobs; the page has these first.
      needs: a setting without which this one has no effect.
    """

    name: str
    kind: Any
    is_optional: bool
    default: Any
    annotation: str = ""
    may_differ: bool = False
    least: int | None = None
    most: int | None = None
    basic: bool = False
    needs: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that it, or each of a collection, may be; empty where any may be."""
        kind = get_args(self.kind)[0] if self.is_collection else self.kind
        return get_args(kind) if get_origin(kind) is Literal else ()

    @property
    def is_collection(self) -> bool:
        """True for a set of texts, taken from a list or tuple too."""
        return get_origin(self.kind) is Collection

    def asks_for_something(self, value: object) -> bool:
        """Return whether ``value`` is neither None nor 0 nor the default, which may be left out."""
        if value is None or value is self.default:
            return False
        # Only numbers are compared: an array has no truth, and a user's policy may have none.
        return not isinstance(value, int | float) or value not in (0, self.default)

    def problem(self, value: object) -> str | None:
        """Return what is wrong with ``value``, of any type; None when no fault is known."""
        if value is None and self.is_optional:
            return None
        if self.kind is str and isinstance(value, str):
            return self._text_problem(value)
        wanted, is_right = self._judged(value)
        if not is_right:
            return f"{self.name} must be {wanted}, not {value!r}"
        if self.most is not None and cast("int", value) > self.most:
            return f"{self.name} must be at most {self.most}, not {value!r}"
        return None

    def _judged(self, value: Any) -> tuple[str, bool]:
        """Return what values must be, in words, and whether ``value`` is that."""
        is_flag = isinstance(value, bool)
        if self.kind is bool:
            return "True or False", is_flag
        if self.kind is int:
            least = self.least or 0
            return f"a whole number of at least {least}", is_whole_number(value, least)
        if self.kind is float:
            is_number = isinstance(value, int | float) and not is_flag
            return "a positive number of seconds", is_number and 0 < value < LONGEST_TIME_S
        if self.choices:
            return self._judged_choice(value)
        if get_origin(self.kind) is Callable:
            return "a function", callable(value)
        return "a text", self.kind is not str

    def _judged_choice(self, value: Any) -> tuple[str, bool]:
        *others, last = map(repr, self.choices)
        names = f"{', '.join(others)} or {last}"
        if not self.is_collection:
            return names, self._is_choice(value)
        is_right = isinstance(value, set | frozenset | list | tuple)
        given = cast("Collection[object]", value) if is_right else ()
        return f"a set of {names}", is_right and all(map(self._is_choice, given))

    def _is_choice(self, value: object) -> bool:
        return isinstance(value, str) and value in self.choices

    def _text_problem(self, value: str) -> str | None:
        longest = self.most or MAX_SETTING_CHARS
        if len(value) < (self.least or 0):
            return f"{self.name} is empty"
        if not value.isprintable():
            return f"{self.name} {value!r} has characters that no name has"
        if len(value) > longest:
            return f"{self.name} {value[:20]!r}... is longer than {longest} characters"
        return None


def setting(default: T, **traits: Any) -> T:
    """Declare a field of ``Config`` with ``traits``: fields of ``Setting``."""
    return cast(T, dataclasses.field(default=cast(Any, default), metadata=traits))


@functools.cache
def settings_table(config: type) -> tuple[Setting, ...]:
    """Return a row for each setting of ``config``, which is ``Config``, in its order."""
    kinds = get_type_hints(config)
    rows: list[Setting] = []
    for field in dataclasses.fields(config):
        if not field.metadata.get("is_setting", True):
            continue
        parts = get_args(kinds[field.name])
        others = [part for part in parts if part is not NoneType]
        row = Setting(
            name=field.name,
            annotation=str(field.type),
            kind=others[0] if NoneType in parts and len(others) == 1 else kinds[field.name],
            is_optional=NoneType in parts,
            default=field.default,
            **field.metadata,
        )
        rows.append(row)
    return tuple(rows)


def is_whole_number(value: object, least: int) -> bool:
    """Return whether ``value`` is a whole number of Python, at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
