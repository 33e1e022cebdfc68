"""Modules of other projects that are not public, for what has no public name.

Their versions are capped in ``pyproject.toml``: such a name may go in any release.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from packaging.requirements import Requirement

from emergency_ckpt.errors import MissingDependency

_DISTRIBUTION = "emergency-ckpt"


def private_module(name: str, *needed: str, project: str) -> Any:
    """Return the module ``name`` of ``project``, which has all names in ``needed``.

    Raises:
      MissingDependency: the module, or one of the names, is not there. The error says the version
        that is installed, and the range of versions that this package works with.
    """
    try:
        module = import_module(name)
        for attribute in needed:
            getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        installed, supported = _versions(project)
        raise MissingDependency(
            "import",
            name,
            f"this version of {project} lacks what emergency_ckpt uses of it ({error})",
            expected=supported,
            actual=installed,
            hint=f"pip install '{supported}'",
        ) from error
    return module


def _versions(project: str) -> tuple[str, str]:
    """Return the installed version of ``project``, and the requirement of this package."""
    try:
        installed = f"{project} {metadata.version(project)}"
    except metadata.PackageNotFoundError:
        installed = f"no {project}"
    try:
        declared = [Requirement(text) for text in metadata.requires(_DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        declared = []  # a source tree: the supported range is known by its pyproject.toml alone
    ranges = [
        f"{requirement.name}{requirement.specifier}"
        for requirement in declared
        if requirement.name == project
    ]
    return installed, ranges[0] if ranges else f"another version of {project}"
