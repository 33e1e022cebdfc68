"""The library without extras: it trains, saves, restores, and imports the extras that are left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import emergency_ckpt

DELETED = {
    "event_log": ["extras/event_log.py"],
    "hang": ["extras/hang.py"],
    "notices": ["extras/notices.py"],
    "pace": ["extras/pace.py"],
    "progress": ["extras/progress.py"],
    "prometheus": ["extras/metrics.py", "extras/prometheus.py", "extras/prometheus_server.py"],
    "striped": ["extras/striped.py"],
    "all": ["extras"],
}
"""What is deleted by its name; tools, which may need extras, are deleted each time."""
TEXTS = {
    "event_log": "event_log(/logs)",
    "hang": "hang(600)",
    "notices": "notices(gce)",
    "progress": "progress",
    "prometheus": "prometheus(0)",
    "all": "hang(600)",
}
"""The text of an observer that is deleted."""

_PROGRAM = """
import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path

# An editable installation finds the checkout, whatever the path says.
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
import jax.numpy as jnp
import orbax.checkpoint  # once for all forks, as JAX


def run(package, scratch, text):
    sys.path.insert(0, package)
    import emergency_ckpt
    from emergency_ckpt import EmergencyCheckpointer
    from emergency_ckpt.errors import ConfigError

    assert Path(emergency_ckpt.__file__).is_relative_to(package), emergency_ckpt.__file__
    config = EmergencyCheckpointer.default_config().set(
        dir=scratch + "/stored", local_dir=scratch + "/ram", local_save_every=1, save_every=2
    )
    lives = []
    for last in (4, 6):
        with config.instantiate() as ckpt:
            step, state = ckpt.restore(state={"w": jnp.zeros(4)})
            first = (step or 0) + 1
            for step in range(first, last + 1):
                state = {"w": state["w"] + step}
                ckpt.save(step=step, state=state)
            ckpt.wait_until_finished()
        lives.append([first, step, float(state["w"][0])])
    imported = []
    if (Path(package) / "emergency_ckpt" / "extras").is_dir():
        extras = importlib.import_module("emergency_ckpt.extras")
        for module in pkgutil.walk_packages(extras.__path__, extras.__name__ + "."):
            importlib.import_module(module.name)
            imported.append(module.name.rpartition(".")[2])
    error = ""
    try:
        if text:
            config.set(on_event=text).instantiate().stop()
    except ConfigError as problem:
        error = str(problem)
    return {"lives": lives, "imported": imported, "error": error}


for name, package, scratch, text in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        print(json.dumps([name, run(package, scratch, text)]), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, name
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fork of one program found with each of ``DELETED`` gone."""
    package = Path(emergency_ckpt.__file__).parent
    native = sys.modules["emergency_ckpt._native"].__file__
    assert native is not None
    root = tmp_path_factory.mktemp("without")
    jobs: list[tuple[str, str, str, str]] = []
    for name, gone in DELETED.items():
        copy = root / name / "emergency_ckpt"
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("tools"))
        shutil.copy(native, copy)
        for path in gone:
            shutil.rmtree(copy / path) if (copy / path).is_dir() else (copy / path).unlink()
        scratch = root / f"{name}_scratch"
        scratch.mkdir()
        jobs.append((name, str(copy.parent), str(scratch), TEXTS.get(name, "")))
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(jobs)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", DELETED)
def test_library_without_an_extra_trains_and_restores(results: dict[str, Any], name: str) -> None:
    result = results[name]
    assert result["lives"] == [[1, 4, 10.0], [5, 6, 21.0]]
    left = {Path(path).stem for other in DELETED for path in DELETED[other]} - {"extras"}
    left -= {Path(path).stem for path in DELETED[name]}
    assert left <= set(result["imported"]) or name == "all"
    if name in TEXTS:
        extra = TEXTS[name].partition("(")[0]
        assert f"on_event: there is no extra '{extra}'" in result["error"]
