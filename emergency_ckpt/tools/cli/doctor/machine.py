"""Checks of the installation: versions, and the native engine with its speed."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata

import numpy as np
from packaging.requirements import Requirement

from emergency_ckpt import _native
from emergency_ckpt.tools.cli.doctor.findings import Finding

_DISTRIBUTION = "emergency-ckpt"
_NAMED = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy")
_MEASURED_BYTES = 64 << 20
_ROUNDS = 3


def check_versions() -> Finding:
    """Return the versions of Python and the packages; a failure when one is missing or too old.

    No package is imported for it.
    """
    try:
        wanted = [Requirement(text) for text in metadata.requires(_DISTRIBUTION) or ()]
        own = metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        text = "emergency-ckpt runs from a source tree, so the versions it needs are not known"
        return Finding("versions", "warning", text, "Install it: pip install .")
    wrong: list[str] = []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found or 'missing'}, not {requirement.specifier}")
    names = ", ".join(f"{name} {found}" for name in _NAMED if (found := _version(name)))
    text = f"emergency-ckpt {own}, Python {platform.python_version()}, {names}"
    if wrong:
        mend = f"{sys.executable} -m pip install --upgrade {_DISTRIBUTION}"
        return Finding("versions", "failure", "; ".join(wrong), mend)
    return Finding("versions", "ok", text)


def check_engine() -> Finding:
    """Return the native engine's CRC32C and its speed beside a plain copy. Takes half a second."""
    kind = _native.implementation()
    copy_gb_s, plain_gb_s = _speeds()
    measured = {"copy_crc32c_gb_per_s": copy_gb_s, "memcpy_gb_per_s": plain_gb_s}
    text = f"CRC32C by {kind}: copies {copy_gb_s:.1f} GB/s, memcpy {plain_gb_s:.1f} GB/s"
    if kind == "portable":
        mend = "Run on a processor with SSE 4.2 or ARMv8 CRC instructions; saves take longer here."
        return Finding("engine", "warning", text, mend, measured)
    return Finding("engine", "ok", text, measured=measured)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _speeds() -> tuple[float, float]:
    """Return GB/s of a copy with CRC32C and of a plain copy, one thread each, best of three."""
    source = np.full(_MEASURED_BYTES, 7, np.uint8)
    fd = os.memfd_create("eckpt-doctor")
    try:
        os.ftruncate(fd, _MEASURED_BYTES)
        mapping = _native.Mapping(fd, _MEASURED_BYTES, writable=True)
    finally:
        os.close(fd)
    target = np.zeros_like(source)
    try:
        _native.prefault(mapping, 0, _MEASURED_BYTES, 1)
        checked_s = _best_s(lambda: _native.copy_crc32c(mapping, [(source, 0)], 1))
        plain_s = _best_s(lambda: np.copyto(target, source))
    finally:
        mapping.close()
    return _MEASURED_BYTES / 1e9 / checked_s, _MEASURED_BYTES / 1e9 / plain_s


def _best_s(work: Callable[[], object]) -> float:
    def once_s() -> float:
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s

    return min(once_s() for _ in range(_ROUNDS))
