"""The JSON documents of an item, as Orbax's handler of pytrees writes them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from emergency_ckpt.errors import CorruptData
from emergency_ckpt.storage.item.state import JAX_ARRAY, ItemArray

SHARDINGS = "_sharding"

_SEQUENCE, _MAPPING = 1, 2
_EMPTY = ((list, "List"), (tuple, "Tuple"), (Mapping, "Dict"))


class NamedArray(NamedTuple):
    """An array by Orbax's name of it."""

    name: str
    array: ItemArray


class ItemTree:
    """The structure of an item: the state with an ``ItemArray`` or None for each leaf."""

    def __init__(self, state: Any) -> None:
        # Empty containers count as leaves, since Orbax keeps them.
        self._leaves = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=ocp.utils.is_empty_or_leaf
        )[0]
        self.arrays = [
            NamedArray(".".join(ocp.tree.str_keypath(keys)), value)
            for keys, value in self._leaves
            if isinstance(value, ItemArray)
        ]

    def document(self) -> str:
        """Return the document of the tree."""
        return json.dumps(
            {
                "tree_metadata": dict(self._entries()),
                "use_ocdbt": True,
                "use_zarr3": False,
                "store_array_data_equal_to_fill_value": True,
                "custom_metadata": None,
            }
        )

    def _entries(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for keys, value in self._leaves:
            names = [str(ocp.utils.get_key_name(key)) for key in keys]
            kinds = [_SEQUENCE if ocp.utils.is_sequence_key(key) else _MAPPING for key in keys]
            described: dict[str, Any]
            if isinstance(value, ItemArray):
                described = {"value_type": value.kind, "skip_deserialize": False}
                if value.kind == JAX_ARRAY:
                    described["write_shape"] = value.write_shape
            else:
                described = {"value_type": _empty(value), "skip_deserialize": True}
            yield (
                str(tuple(names)),
                {
                    "key_metadata": [
                        {"key": name, "key_type": kind}
                        for name, kind in zip(names, kinds, strict=True)
                    ],
                    "value_metadata": described,
                },
            )


def _empty(value: Any) -> str:
    """Return Orbax's name of an empty node. It keeps no named tuples and no classes."""
    if not hasattr(value, "_fields"):
        for kind, name in _EMPTY:
            if isinstance(value, kind):
                return name
    return "None"


def shardings(arrays: Sequence[NamedArray]) -> str | None:
    """Return the document of the shardings; None when no array has one that Orbax knows."""
    texts: dict[jax.sharding.Sharding, str | None] = {}
    found: dict[str, str] = {}
    for name, array in arrays:
        if array.sharding is None:
            continue
        if array.sharding not in texts:
            texts[array.sharding] = _sharding(array.sharding)
        text = texts[array.sharding]
        if text is not None:
            found[base64.urlsafe_b64encode(name.encode()).decode()] = text
    return json.dumps(found) if found else None


def _sharding(sharding: jax.sharding.Sharding) -> str | None:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding).to_serialized_string()
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        single = ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding)
        return single.to_serialized_string()
    return None


def array_metadata(arrays: Sequence[NamedArray]) -> str | None:
    """Return the document of the arrays, the same for all writers; None when there are none."""
    found = [
        {
            "array_metadata": {
                "param_name": name,
                "write_shape": array.write_shape,
                "chunk_shape": array.chunk_shape,
                "ext_metadata": array.key_impl and {"random_key_impl": array.key_impl},
            }
        }
        for name, array in arrays
        if array.kind == JAX_ARRAY
    ]
    return json.dumps({"array_metadatas": found}) if found else None


def arrays_name(process: int) -> str:
    """Return the name below the item of the document of the arrays that ``process`` wrote."""
    return f"array_metadatas/process_{process}"


def check_same_arrays(own: str, other: bytes | None, path: str, writer: int) -> None:
    """Raise CorruptData when ``writer`` divided the arrays in another way than this process.

    ``own``, ``other``: their documents of the arrays; that of ``writer`` is at ``path``.
    """
    if other != own.encode():
        raise CorruptData("save", path, f"process {writer} stored other arrays than this process")
