"""Steps that plain Orbax wrote: their items with arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from etils import epath

from emergency_ckpt.storage.orbax_names import TREE
from emergency_ckpt.storage.orbax_reader import StoredLeaf, describe_item
from emergency_ckpt.storage.steps.folders import ITEMS


def describe_plain(
    folder: epath.Path, item: str | None
) -> tuple[epath.Path, dict[str, StoredLeaf]]:
    """Return the folder of a step's arrays and its leaves by path, from metadata alone. Blocks.

    Without ``item``, and without an item named in ``ITEMS``, the arrays of all items form one state
    with the items' names as its keys.

    Args:
      item: the name of the item to take, or None.

    Raises:
      FileNotFoundError: no such item, or none with arrays. Errors of Orbax pass through.
    """
    names = _items_with_arrays(folder, item)
    return describe_items(folder, names, lambda name, _: describe_item(folder / name))


def describe_items(
    folder: epath.Path,
    names: Sequence[str],
    describe: Callable[[str, str], Mapping[str, StoredLeaf]],
) -> tuple[epath.Path, dict[str, StoredLeaf]]:
    """Return the folder of the items called ``names`` and their leaves by path. Blocks.

    The leaves of several are below the names of their items, and TensorStore reads them.

    Args:
      describe: returns the leaves of an item; its second argument is what the paths of the state
        have before those of the item.
    """
    if len(names) == 1:
        return folder / names[0] if names[0] else folder, dict(describe(names[0], ""))
    leaves: dict[str, StoredLeaf] = {}
    for name in names:
        for path, (spec, array) in describe(name, f"{name}/").items():
            below = msgspec.structs.replace(spec, path=f"{name}/{path}" if path else name)
            leaves[below.path] = StoredLeaf(
                below, msgspec.structs.replace(array, item=name, plain=False)
            )
    return folder, leaves


def _items_with_arrays(folder: epath.Path, item: str | None) -> Sequence[str]:
    usual = (*ITEMS, "") if item is None else (item,)
    for name in usual:
        if ((folder / name if name else folder) / TREE).exists():
            return (name,)
    below = sorted(path.name for path in folder.iterdir() if path.is_dir())
    found = [name for name in below if (folder / name / TREE).exists()]
    if item is None and found:
        return found
    wanted = "no item of arrays" if item is None else f"no item {item!r} of arrays (orbax_item)"
    raise FileNotFoundError(f"{wanted} in it; it has {', '.join(below) or 'none'}")
