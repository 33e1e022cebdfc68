"""Which steps in storage who reads, by kind of leaf: the table of docs/migrating.md.

``python tests/orbax/test_interoperability.py`` writes the table into the page.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental import v1
from orbax.checkpoint.experimental.emergency import checkpoint_manager as orbaxs

import emergency_ckpt.orbax.v1 as our_v1
from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt import orbax as emergency
from emergency_ckpt.orbax import checkpoint as plain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
BEGIN, END = "<!-- who reads what: begin -->", "<!-- who reads what: end -->"


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, -1), ("slice", "fsdp"))


def sharded(dtype: str) -> jax.Array:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = (np.arange(16) % 3).astype(kind).reshape(8, 2)
    if dtype == "float32":
        values.reshape(-1)[0] = -0.0
    return jax.device_put(values, NamedSharding(mesh(), P("fsdp")))


KINDS: dict[str, Callable[[], Any]] = {
    **{
        name: functools.partial(sharded, name)
        for name in ("float32", "bfloat16", "int8", "bool", "float8_e4m3fn", "int4")
    },
    "PRNG key": lambda: jax.device_put(jax.random.key(7), NamedSharding(mesh(), P())),
    "number": lambda: 3,
    "numpy": lambda: np.arange(3),
    "empty": lambda: jax.device_put(np.zeros((0, 4), np.float32), NamedSharding(mesh(), P())),
}


def target_of(leaf: Any) -> Any:
    """Return what a trainer restores into."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf * 0


def is_same(found: Any, leaf: Any) -> bool:
    """Return whether a leaf came back bit for bit; a number by its value."""
    if not isinstance(leaf, jax.Array):
        return np.array_equal(found, leaf)
    if not isinstance(found, jax.Array) or found.dtype != leaf.dtype or found.shape != leaf.shape:
        return False
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        found, leaf = jax.random.key_data(found), jax.random.key_data(leaf)
    return np.asarray(found).tobytes() == np.asarray(leaf).tobytes()


State = dict[str, Any]


@contextlib.contextmanager
def native(root: Path, state: State) -> Iterator[EmergencyCheckpointer]:
    del state
    settings = {"dir": str(root / "run"), "local_dir": str(root / "ram-native"), "save_every": 1}
    with EmergencyCheckpointer(mesh=mesh(), **settings) as checkpointer:
        yield checkpointer


def save_native(root: Path, state: State) -> None:
    with native(root, state) as checkpointer:
        checkpointer.save(step=1, state=state)
        checkpointer.wait_until_finished()
        checkpointer.check_for_errors()


def load_native(root: Path, target: State) -> Any:
    with native(root, target) as checkpointer:
        return checkpointer.restore(state=target)[1]


def plain_of(module: Any, root: Path) -> Any:
    given = {"local_directory": root / "ram-plain"} if module is plain else {}
    options = module.CheckpointManagerOptions(**given)
    return module.CheckpointManager(root / "run", options=options)


def save_plain(module: Any, root: Path, state: State) -> None:
    with plain_of(module, root) as manager:
        manager.save(1, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
        manager.wait_until_finished()


def load_plain(module: Any, root: Path, target: State) -> Any:
    with plain_of(module, root) as manager:
        args = ocp.args.StandardRestore(target)
        if (root / "run" / "1" / "default").is_dir():  # Orbax's name of an item without one
            return manager.restore(1, args=args)
        return manager.restore(1, args=ocp.args.Composite(state=args)).state


def emergency_of(module: Any, root: Path, target: State) -> Any:
    directories = root / f"ram-{module.__name__}", root / "run"
    for each in directories:
        each.mkdir(exist_ok=True)
    persistent = module.PersistentCheckpointOptions(save_interval_steps=1)
    options = module.CheckpointManagerOptions(persistent=persistent)
    return module.CheckpointManager(*directories, mesh(), target, options=options)


def save_emergency(module: Any, root: Path, state: State) -> None:
    with emergency_of(module, root, jax.tree.map(target_of, state)) as manager:
        manager.save(1, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
        manager.wait_until_finished()


def load_emergency(module: Any, root: Path, target: State) -> Any:
    with emergency_of(module, root, target) as manager:
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(target))
        return manager.restore(1, args=args).state


def v1_of(module: Any, root: Path) -> Any:
    given = {"local_directory": root / "ram-v1"} if module is our_v1 else {}
    return module.training.Checkpointer(root / "run", **given)


def save_v1(module: Any, root: Path, state: State) -> None:
    with v1_of(module, root) as checkpointer:
        checkpointer.save(1, state)


def load_v1(module: Any, root: Path, target: State) -> Any:
    with v1_of(module, root) as checkpointer:
        item = next(n for n in ("state", "default") if (root / "run" / "1" / n).is_dir())
        return checkpointer.load(1, target, checkpointable_name=item)


FACES: dict[str, tuple[Callable[[Path, State], None], Callable[[Path, State], Any]]] = {
    "native": (save_native, load_native),
    "plain face": (functools.partial(save_plain, plain), functools.partial(load_plain, plain)),
    "emergency face": (
        functools.partial(save_emergency, emergency),
        functools.partial(load_emergency, emergency),
    ),
    "v1 face": (functools.partial(save_v1, our_v1), functools.partial(load_v1, our_v1)),
    "Orbax's manager": (functools.partial(save_plain, ocp), functools.partial(load_plain, ocp)),
    "Orbax's emergency manager": (
        functools.partial(save_emergency, orbaxs),
        functools.partial(load_emergency, orbaxs),
    ),
    "Orbax v1": (functools.partial(save_v1, v1), functools.partial(load_v1, v1)),
}


def failing_kinds(writer: str, root: Path) -> dict[str, set[str]]:
    """Return, for each reader, the kinds of leaf in a step of ``writer`` that do not come back.

    "-" is a kind that the writer refuses; it is no fault of a reader's.
    """
    failing: dict[str, set[str]] = {reader: set() for reader in FACES}
    for kind, make in KINDS.items():
        place, state = root / writer.replace(" ", "-") / kind.replace(" ", "-"), {"x": make()}
        place.mkdir(parents=True)
        try:
            FACES[writer][0](place, state)
        except Exception:  # noqa: BLE001 - the table says it, whatever it is
            for kinds in failing.values():
                kinds.add(f"-{kind}")
            continue
        for reader, (_, load) in FACES.items():
            try:
                found = load(place, jax.tree.map(target_of, state))["x"]
            except Exception:  # noqa: BLE001 - as above
                found = None
            if not is_same(found, state["x"]):
                failing[reader].add(kind)
    return failing


def table(root: Path) -> str:
    """Return the table as Markdown."""
    rows = ["| step of | refuses to save | " + " | ".join(FACES) + " |"]
    rows.append("|" + "---|" * (len(FACES) + 2))
    for writer in FACES:
        failing = failing_kinds(writer, root)
        refused = {kind[1:] for kind in failing[writer] if kind.startswith("-")}
        cells = []
        for kinds in failing.values():
            bad = [kind for kind in KINDS if kind in kinds]
            some_text = f"not {', '.join(bad)}" if bad else "all"
            cells.append("none" if len(bad) + len(refused) == len(KINDS) else some_text)
        some = ", ".join(kind for kind in KINDS if kind in refused) or "nothing"
        rows.append(f"| {writer} | {some} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def test_page_says_who_reads_what(tmp_path: Path) -> None:
    page = PAGE.read_text()
    written = page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip()
    assert written == table(tmp_path)


def write_page() -> None:
    logging.disable()
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as root:
        made = table(Path(root))
    page = PAGE.read_text()
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(f"{page[:begin]}\n{made}\n{page[end:]}")


if __name__ == "__main__":
    assert "xla_force_host_platform_device_count=8" in os.environ.get("XLA_FLAGS", "")
    write_page()
