"""The one name of a directory, by whatever path or URL it was given."""

from __future__ import annotations

import os


def resolved(directory: str) -> str:
    """Return a path without links, ``..`` and ``//``, or a URL without empty parts.

    TensorStore, Orbax and this package then see one name. A link that is changed later is not
    followed anew. Reads the file system for a path.
    """
    scheme, is_url, rest = directory.partition("://")
    if not is_url:
        return os.path.realpath(directory)
    return f"{scheme}://{'/'.join(part for part in rest.split('/') if part)}"
