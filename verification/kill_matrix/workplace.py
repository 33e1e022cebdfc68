"""A copy of the checkout, with an interpreter of its own that imports the product from the copy.

Edits are made in the copy, one mutant at a time, and taken back.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from defects import HERE, ROOT, Mutant

_PARTS = ("emergency_ckpt", "native", "tests", "verification")


class Workplace:
    """The copy, in memory. ``state`` names the contents of product and tests."""

    def __init__(self) -> None:
        self.tree = Path(tempfile.mkdtemp(prefix="eckpt-kill-matrix-", dir="/dev/shm"))
        self._warm: subprocess.Popen[str] | None = None
        digest = hashlib.sha256()
        for name in _tracked():
            source, target = ROOT / name, self.tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
            if name.startswith(_PARTS) and not name.startswith("verification/kill_matrix"):
                digest.update(f"{name}\0".encode() + hashlib.sha256(source.read_bytes()).digest())
        self.state = digest.hexdigest()[:12]
        # The copies keep the times of their sources, so bytecode that is there is valid.
        for part in _PARTS:
            for cache in (ROOT / part).rglob("__pycache__"):
                shutil.copytree(cache, self.tree / cache.relative_to(ROOT), dirs_exist_ok=True)
        native = importlib.util.find_spec("emergency_ckpt._native")
        assert native is not None
        assert native.origin is not None
        shutil.copy2(native.origin, self.tree / "emergency_ckpt")
        self.python = self._interpreter()
        self._compile("emergency_ckpt", "tests", "verification")
        self._see_that_the_copy_is_imported()

    def __enter__(self) -> Workplace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._warm is not None:
            assert self._warm.stdin is not None
            self._warm.stdin.close()
            self._warm.wait()
        shutil.rmtree(self.tree)

    def _interpreter(self) -> Path:
        place = self.tree / ".venv"
        venv.create(place, symlinks=True)
        (site,) = place.glob("lib/python*/site-packages")
        shutil.copy2(HERE / "entered_hook.py", site)
        # Directories that a .pth file names have none of their own read, so that the hook of the
        # editable installation does not stand before the copy.
        others = [path for path in sys.path if path.endswith("site-packages")]
        (site / "copy.pth").write_text("\n".join([str(self.tree), *others, "import entered_hook"]))
        python = place / "bin" / "python"
        for script in importlib.metadata.distribution("emergency_ckpt").entry_points:
            if script.group == "console_scripts":
                module, _, function = script.value.partition(":")
                program = place / "bin" / script.name
                program.write_text(
                    f"#!{python}\nimport sys\nfrom {module} import {function}\n"
                    f"sys.exit({function}())\n"
                )
                program.chmod(0o755)
        return python

    def environment(self) -> dict[str, str]:
        """Return the environment of programs in the copy."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        own = {
            "PATH": f"{self.python.parent}{os.pathsep}{kept['PATH']}",
            "KILL_MATRIX_TREE": str(self.tree),
            "JAX_PLATFORMS": "cpu",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
        }
        return {**kept, **own}

    def _compile(self, *names: str) -> None:
        command = [str(self.python), "-m", "compileall", "-q", *names]
        subprocess.run(command, cwd=self.tree, check=True)

    def _see_that_the_copy_is_imported(self) -> None:
        program = "import emergency_ckpt, emergency_ckpt._native as n;"
        program += "print(emergency_ckpt.__file__, n.__file__)"
        command = [str(self.python), "-c", program]
        told = subprocess.run(
            command, cwd="/", env=self.environment(), check=True, capture_output=True, text=True
        ).stdout.split()
        assert all(path.startswith(str(self.tree)) for path in told), told

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Make the edits of a mutant; take them back at the end."""
        before: dict[Path, bytes] = {}
        try:
            for edit in mutant.edits:
                path = self.tree / edit.file
                before.setdefault(path, path.read_bytes())
                text = path.read_text()
                assert text.count(edit.old) == 1, f"{mutant.name}: {edit.file}: {edit.old!r}"
                self._write(path, text.replace(edit.old, edit.new).encode())
            yield
        finally:
            for path, data in before.items():
                self._write(path, data)
            if before:
                self._compile(*(str(path.relative_to(self.tree)) for path in before))

    def _write(self, path: Path, data: bytes) -> None:
        # Bytecode is valid by size and second of the source: that of the former text goes.
        for each in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            each.unlink()
        path.write_bytes(data)

    def pytest(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run pytest in the copy: see ``warm_pytest.py``."""
        if self._warm is None:
            command = [str(self.python), "-P", str(HERE / "warm_pytest.py")]
            self._warm = subprocess.Popen(
                command,
                cwd=self.tree,
                env=self.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        stdin: IO[str] | None = self._warm.stdin
        stdout: IO[str] | None = self._warm.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())


def _tracked() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in told.split("\0") if name and (ROOT / name).is_file())
