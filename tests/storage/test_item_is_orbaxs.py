"""The item that is written equals the one that Orbax's own handlers write, key by key."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from state_samples import mesh_of, on_host, random_bits, sharded

from emergency_ckpt.storage import PersistentTier
from emergency_ckpt.types import SaveId

Empty = collections.namedtuple("Empty", ())
Pair = collections.namedtuple("Pair", ("mu", "nu"))


def state_of() -> dict[str, Any]:
    """Without boxes that Orbax would divide among the devices of one process."""
    mesh = mesh_of(2, 4)
    dtypes = ("bool", "int4", "int8", "uint32", "bfloat16", "float32", "complex64", "float8_e5m2")
    keys = jax.random.split(jax.random.key(3), 8)
    return {
        "params": {
            name: sharded(random_bits((8, 4), name, 1), mesh, ("x", "y")) for name in dtypes
        },
        "opt": Pair({"w": sharded(random_bits((6, 8), "float32", 2), mesh, "x", "y")}, Empty()),
        "replicated": sharded(np.arange(6, dtype=np.int32), mesh),
        "zeros": sharded(np.zeros((8, 2), np.float32), mesh, ("x", "y")),
        "point": sharded(np.array(5, np.int32), mesh),
        "one": jax.numpy.arange(3),
        "key": jax.random.key(1),
        "key_table": jax.device_put(
            jax.random.split(jax.random.key(4), (8, 3)), NamedSharding(mesh, P(("x", "y")))
        ),
        "keys": jax.device_put(keys, NamedSharding(mesh, P(("x", "y")))),
        "host": [np.arange(4), 3, 0.25, True, None],
        "none": {"list": [], "tuple": (), "dict": {}, "null": None},
        "a.dot": {"ends/": np.ones(2)},
    }


def written_by_us(directory: Path, state: Any) -> Path:
    tree, shards = on_host(state)
    tier = PersistentTier(str(directory))
    tier.create()
    tier.write_tensors(SaveId(1, "life", "run"), tree, shards, (0,))
    return directory / "1" / "state"


def written_by_orbax(directory: Path, state: Any) -> Path:
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    items: dict[str, Any] = {"state": handler}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**items)) as checkpointer:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state))
        checkpointer.save(directory / "1", args=args)
    return directory / "1" / "state"


def database(item: Path) -> dict[bytes, bytes]:
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
    return {key: store.read(key).result().value for key in store.list().result()}


def shardings(item: Path) -> dict[str, Any]:
    """By name; axes at the end that are not divided may be named or not."""
    found = json.loads((item / "_sharding").read_text())
    described = {name: json.loads(text) for name, text in found.items()}
    for each in described.values():
        spec = each.get("partition_spec", [])
        while spec and spec[-1] is None:
            spec.pop()
    return described


def names(step: Path) -> set[str]:
    """Files of a step; data files have random names, and so are named by their folder.

    The database of a process is named as Orbax does it, without the save.
    """
    found = (path.relative_to(step) for path in step.rglob("*") if path.is_file())
    listed = {str(path.parent if path.parent.name == "d" else path) for path in found}
    return {re.sub(r"(ocdbt\.process_0)x[0-9a-f]{16}/", r"\1/", name) for name in listed}


@pytest.mark.dear
def test_item_equals_that_of_orbax(tmp_path: Path) -> None:
    state = state_of()
    ours = written_by_us(tmp_path / "ours", state)
    theirs = written_by_orbax(tmp_path / "theirs", state)
    assert names(ours.parent) == names(theirs.parent)
    for document in ("_METADATA", "array_metadatas/process_0"):
        assert json.loads((ours / document).read_text()) == json.loads(
            (theirs / document).read_text()
        )
    assert shardings(ours) == shardings(theirs)
    assert database(ours) == database(theirs)
