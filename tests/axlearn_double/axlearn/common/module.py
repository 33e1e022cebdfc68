"""Modules: what is built from a config and may have a parent."""

from __future__ import annotations

from typing import Any

from axlearn.common.config import REQUIRED, Configurable, Required, config_class


class Module(Configurable):
    """A node in the tree of a trainer's parts."""

    @config_class
    class Config(Configurable.Config):
        """``name``: set by the parent."""

        name: Required[str] = REQUIRED

    def __init__(self, cfg: Any, *, parent: Module | None) -> None:
        super().__init__(cfg)
        del parent

    def __getattr__(self, name: str) -> Any:
        # Parts are attributes of their parent; there are none here.
        raise AttributeError(f"{type(self).__name__} has no attribute or part {name!r}")
