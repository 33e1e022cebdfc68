"""The changes in the pages of docs for users of Orbax and MaxText, carried out and run."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import grain.python as grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from places import MAXTEXT_DOUBLE
from readme_blocks import readme_block

from emergency_ckpt import orbax as emergency

MAXTEXT_VERSIONS = ("0.2.5", "e591f30c")


@pytest.fixture
def root() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="eckpt-test-", dir="/dev/shm"))
    yield root
    shutil.rmtree(root)


class Training:
    """A model that adds up its batches: any batch left out or seen twice shows."""

    def __init__(self) -> None:
        self.mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "data"))
        self.batches: list[int] = []

    def state(self) -> dict[str, Any]:
        rows = NamedSharding(self.mesh, P("data"))
        return {"sum": jax.device_put(np.zeros(8, np.float32), rows), "flags": np.ones(3, bool)}

    def arrays(self) -> dict[str, Any]:
        """As MaxText's state: arrays alone, each with its sharding."""
        return {
            **self.state(),
            "flags": jax.device_put(np.ones(3, bool), NamedSharding(self.mesh, P())),
        }

    def abstract(self) -> Any:
        return jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state())

    def data(self) -> Any:
        return iter(grain.MapDataset.range(1000).shuffle(seed=3).to_iter_dataset())

    def step(self, state: dict[str, Any], batch: int) -> dict[str, Any]:
        self.batches.append(int(batch))
        return {**state, "sum": state["sum"] + float(batch)}


def life(training: Training, root: Path, program: str, last_step: int) -> dict[str, Any]:
    """One life of the README's loop, in directories of the test."""
    for place in ("/dev/shm/ckpt", "/mnt/checkpoints/run7"):
        ours = root / place.rsplit("/", maxsplit=1)[-1]
        ours.mkdir(exist_ok=True)
        assert place in program
        program = program.replace(place, str(ours))
    program = program.replace("save_interval_steps=1000", "save_interval_steps=4")
    program = program.replace("save_interval_steps=10)", "save_interval_steps=3)")
    names: dict[str, Any] = {
        "ocp": ocp,
        "grain": SimpleNamespace(
            checkpoint=SimpleNamespace(
                CheckpointSave=grain.PyGrainCheckpointSave,
                CheckpointRestore=grain.PyGrainCheckpointRestore,
            )
        ),
        "mesh": training.mesh,
        "abstract_state": training.abstract(),
        "state": training.state(),
        "data": training.data(),
        "last_step": last_step,
        "train_step": training.step,
    }
    exec(program, names)
    return names["state"]


@pytest.mark.dear
def test_loop_for_users_of_orbax(root: Path) -> None:
    lines = readme_block("orbax", "diff").splitlines()
    lines = [line for line in lines if not line.startswith("-")]
    program = "\n".join(line[1:] for line in lines)
    undisturbed = Training()
    (root / "a").mkdir()
    wanted = life(undisturbed, root / "a", program, 19)
    training = Training()
    (root / "b").mkdir()
    life(training, root / "b", program, 10)
    shutil.rmtree(root / "b" / "ckpt")  # the end of that life has brought step 9 to storage
    state = life(training, root / "b", program, 19)
    assert training.batches == undisturbed.batches[:11] + undisturbed.batches[10:]
    assert np.array_equal(state["sum"], wanted["sum"])


def double_of(version: str, path: str) -> Path:
    """Return the module that stands for MaxText's at ``path`` in its sources."""
    own = MAXTEXT_DOUBLE / version / Path(path).name
    return own if own.exists() else MAXTEXT_DOUBLE / own.name


def maxtext_sources(version: str) -> dict[str, str]:
    """The modules that stand for MaxText's, by their paths there, with the page's change made."""
    lines = readme_block(f"maxtext-{re.escape(version)}", "diff")
    parts = re.split(r"^@@ (.*)$\n", lines, flags=re.MULTILINE)[1:]
    hunks = list(zip(parts[::2], parts[1::2], strict=True))
    assert len(hunks) == 4
    sources: dict[str, str] = {}
    for where, text in hunks:
        match = re.fullmatch(r"((?:\n?-.*)+)\n((?:\n?\+.*)+)\n", text)
        assert match is not None, text
        old, new = ([line[1:].strip() for line in side.split("\n")] for side in match.groups())
        for path in re.findall(r"src/\S+\.py", where):
            source = sources.get(path) or double_of(version, path).read_text()
            found = re.search(
                r"^( *)" + r"\n *".join(map(re.escape, old)) + "$", source, re.MULTILINE
            )
            assert found is not None, (path, old)
            after = "\n".join(found.group(1) + line for line in new)
            sources[path] = source.replace(found.group(0), after)
    return sources


@pytest.fixture(params=MAXTEXT_VERSIONS)
def maxtext(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    sources = maxtext_sources(request.param)
    doubles = [*MAXTEXT_DOUBLE.glob("*.py"), *(MAXTEXT_DOUBLE / request.param).glob("*.py")]
    assert sorted(Path(path).stem for path in sources) == sorted(each.stem for each in doubles)
    modules: dict[str, ModuleType] = {}
    for path in sorted(sources, key=lambda path: "emergency" not in path):
        module = modules[Path(path).stem] = ModuleType(Path(path).stem)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(sources[path], path, "exec"), module.__dict__)
    return SimpleNamespace(**modules)


def test_change_in_maxtext(root: Path, maxtext: SimpleNamespace) -> None:
    checkpointing, training = maxtext.checkpointing, Training()
    assert checkpointing.EmergencyCheckpointManager is emergency.CheckpointManager
    (root / "local").mkdir()
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, training.arrays())

    def create() -> Any:
        return maxtext.emergency_checkpointing.create_emergency_checkpoint_manager(
            str(root / "local"), str(root / "persistent"), training.mesh, abstract, 2, 5
        )

    manager = create()
    data = SimpleNamespace(local_iterator=training.data())
    assert checkpointing.load_state_if_possible(manager, data, abstract) == (None, None)
    state = training.arrays()
    for step in range(9):
        state = training.step(state, next(data.local_iterator))
        checkpointing.save_checkpoint(manager, step, state, data)
    checkpointing.last_save(manager, 8, state, data)
    assert manager.all_steps() == [0, 5, 8]
    following = [next(data.local_iterator) for _ in range(3)]
    # The next life: another manager over the same directories, an iterator at its beginning.
    manager = create()
    again = SimpleNamespace(local_iterator=training.data())
    restored, none = checkpointing.load_state_if_possible(manager, again, abstract)
    assert none is None
    overlay = maxtext.maxtext_utils.overlay(manager, restored)
    assert np.array_equal(overlay["sum"], state["sum"])
    assert [next(again.local_iterator) for _ in range(3)] == following
    manager.close()
