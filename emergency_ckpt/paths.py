"""Paths and URLs of the two tiers: their one form, and what is wrong with one. Without JAX."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from etils import epath

_UNSTORABLE = re.compile(r"[\\*?\[]|(?<=/)gs:(?=/)")
"""TensorStore takes a backslash for a slash. Orbax looks for what it has written by a pattern that
contains the whole path, and takes ``gs:`` in the middle of one for the start of a URL."""


def plain_path(directory: str) -> str:
    """Return the path of a URL that begins with ``file:///``, and any other text as it is."""
    path = directory.removeprefix("file://")
    return unquote(path) if path != directory and path[:1] == "/" else directory


def resolved(directory: str) -> str:
    """Return a path without links, ``..`` and ``//``, or a URL without empty parts.

    TensorStore, Orbax and this package then see one name. A link that is changed later is not
    followed anew. Reads the file system for a path.
    """
    directory = plain_path(directory)
    scheme, is_url, rest = directory.partition("://")
    if not is_url:
        return os.path.realpath(directory)
    return f"{scheme}://{'/'.join(part for part in rest.split('/') if part)}"


def dir_problems(directory: str) -> Iterator[str]:
    """Yield what is wrong with the setting ``dir``."""
    wrong = _UNSTORABLE.search(f"{directory}/")
    if wrong is not None:
        yield f"dir {directory!r}: Orbax cannot store arrays below a name with {wrong.group()!r}"
        return
    if "://" not in directory:
        if not Path(directory).is_absolute():
            yield f"dir {directory!r} is not an absolute path"
        return
    try:
        epath.Path(directory)
    except (KeyError, ValueError) as error:
        why = f"which knows no {error}" if isinstance(error, KeyError) else str(error)
        yield f"dir {directory!r} cannot be reached by etils.epath, {why}"
        return
    rest = directory.partition("://")[2]
    if not rest.partition("/")[0]:
        yield f"dir {directory!r} names no bucket"
    elif "#" in rest or {".", ".."} & set(rest.split("/")):
        yield f"dir {directory!r}: Orbax would store arrays elsewhere (a '#', '.' or '..')"


def local_dir_problems(local_dir: str) -> Iterator[str]:
    """Yield what is wrong with the setting ``local_dir``."""
    if not local_dir:
        yield "local_dir is not set (a directory on a tmpfs, e.g. /dev/shm/eckpt)"
    elif not Path(local_dir).is_absolute():
        yield f"local_dir {local_dir!r} is not an absolute path"
