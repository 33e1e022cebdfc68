"""Extras by name: a setting may name an extra in a text, such as ``"striped(2)"``.

The text names a module of ``emergency_ckpt.extras`` and an argument for its ``from_text``. Nothing
below ``extras`` imports an extra, so the folder can be deleted; a text then names nothing.
"""

from __future__ import annotations

import importlib
import re

from emergency_ckpt.core.placement import (
    ALL_BUT_PRIMARY,
    AllButPrimary,
    PlacementPolicy,
)
from emergency_ckpt.errors import ConfigError

_FOLDER = "emergency_ckpt.extras"
_TEXT = re.compile(r"([a-z][a-z_]{0,40})(?:\((.{0,4096})\))?", re.DOTALL)


def extension_of(setting: str, text: str) -> object:
    """Return what the extra that ``text`` names makes of its argument.

    Raises:
      ConfigError: no extra has this name, or the extra refuses the argument. The text names
        ``setting``.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError([f"{setting}: {text!r} is no name of an extra, such as 'name(argument)'"])
    name = f"{_FOLDER}.{match[1]}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (_FOLDER, name):
            raise ConfigError(
                [f"{setting}: {match[1]!r} needs the module {error.name!r}, which is not installed"]
            ) from error
        raise ConfigError([f"{setting}: there is no extra {match[1]!r}"]) from error
    if not hasattr(module, "from_text"):
        raise ConfigError([f"{setting}: the extra {match[1]!r} has no text: pass its object"])
    return module.from_text(match[2] or "")


def parse_placement(text: str) -> PlacementPolicy:
    """Return the policy named by ``"all_but_primary"``, or by an extra as ``"striped(2)"``.

    Raises:
      ConfigError: anything else.
    """
    if text == ALL_BUT_PRIMARY:
        return AllButPrimary()
    policy = extension_of("placement", text)
    if not isinstance(policy, PlacementPolicy):
        raise ConfigError([f"placement: {text!r} is an extra, but no placement"])
    return policy
