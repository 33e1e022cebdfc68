"""Count what a reader of the code has to hold: ``make size``.

    python tests/size.py [--against REVISION]

Prints a table of the figures of this tree, and with ``--against`` those of a revision beside them.
A change that adds to a figure says why in its message; none fails. The calls of a save and of a
restore are counted in this tree only, since they run it.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What people run beside a training job; the rest of the package is the library.
TOOLS = {"cli", "deploy", "launch", "draining", "report", "survey", "testing", "tools"}
SMALL_MODULE_LINES = 60
# A test holds on to a face if it imports nothing deeper than ``emergency_ckpt.room``.
FACE_PARTS = 2
# Users import it: ``emergency_ckpt.orbax.checkpoint`` stands for ``orbax.checkpoint``.
FACE = "emergency_ckpt.orbax.checkpoint"


class Tree:
    """The Python files of one tree, parsed once."""

    def __init__(self, root: Path) -> None:
        package = root / "emergency_ckpt"
        self.root = root
        self.package = {
            path.relative_to(package): ast.parse(path.read_bytes())
            for path in sorted(package.rglob("*.py"))
        }
        self.tests = {
            path.relative_to(root): ast.parse(path.read_bytes())
            for path in sorted((root / "tests").rglob("*.py"))
        }
        self.verification = {
            path.relative_to(root): ast.parse(path.read_bytes())
            for path in sorted((root / "verification").rglob("*.py"))
        }

    def figures(self) -> dict[str, int | float]:
        """Return each figure by its name."""
        lines = {name: self._lines(Path("emergency_ckpt") / name) for name in self.package}
        library = [name for name in lines if name.parts[0] not in TOOLS]
        classes = [
            node
            for tree in self.package.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        ]
        total = sum(lines.values())
        return {
            "package: lines": total,
            "package: files": len(lines),
            "library: lines": sum(lines[name] for name in library),
            "library: files": len(library),
            "classes": len(classes),
            "classes for 1,000 lines": round(1000 * len(classes) / total, 1),
            "records and messages (msgspec)": sum(map(is_record, classes)),
            "file names used twice or more": self._names_used_twice(),
            "modules under 60 lines with one importer": self._slivers(lines),
            "settings": self._settings(),
            "commands": self._calls("tools/cli/main.py", "Command"),
            "tests: lines": sum(map(self._lines, self.tests)),
            "verification: lines": sum(map(self._lines, self.verification)),
            "tests: functions": sum(map(len, map(test_functions, self.tests.values()))),
            "tests: functions below a face, per cent": self._tests_below_a_face(),
        }

    def _lines(self, name: Path) -> int:
        return len((self.root / name).read_bytes().splitlines())

    def _names_used_twice(self) -> int:
        names = Counter(name.name for name in self.package if name.name != "__init__.py")
        return sum(count > 1 for count in names.values())

    def _slivers(self, lines: dict[Path, int]) -> int:
        importers: Counter[str] = Counter()
        for tree in self.package.values():
            importers.update(imported(tree))
        return sum(
            name.name != "__init__.py"
            and lines[name] < SMALL_MODULE_LINES
            and importers[".".join(("emergency_ckpt", *name.with_suffix("").parts))] == 1
            for name in self.package
        )

    def _calls(self, module: str, function: str) -> int:
        found = [
            tree
            for name, tree in self.package.items()
            if name.as_posix().endswith(module.removeprefix("tools/"))
        ]
        return sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == function
            for tree in found
            for node in ast.walk(tree)
        )

    def _settings(self) -> int:
        """Return the number of fields of ``Config`` that ``setting`` declares."""
        return sum(
            isinstance(field, ast.AnnAssign)
            and isinstance(field.value, ast.Call)
            and ast.unparse(field.value.func) == "setting"
            for name, tree in self.package.items()
            if name.as_posix() == "config/settings.py"
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == "Config"
            for field in node.body
        )

    def _tests_below_a_face(self) -> int:
        below = count = 0
        for tree in self.tests.values():
            functions = len(test_functions(tree))
            count += functions
            if any(is_below_a_face(module, self.package) for module in imported(tree)):
                below += functions
        return round(100 * below / max(1, count))


def is_record(node: ast.ClassDef) -> bool:
    """Return whether ``node`` is a class of msgspec, directly."""
    return any(ast.unparse(base).rpartition(".")[2] == "Struct" for base in node.bases)


def test_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the test functions of a file."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def imported(tree: ast.Module) -> set[str]:
    """Return the modules of the package that ``tree`` imports, and names that may be modules."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in names if name.startswith("emergency_ckpt.")}


def is_below_a_face(module: str, package: dict[Path, ast.Module]) -> bool:
    """Return whether ``module`` lies in a room, and is none of its faces. ``core`` is all face."""
    parts = module.split(".")
    face_parts = FACE_PARTS + (parts[1] == "tools")  # each of the tools is a room
    if len(parts) <= face_parts or parts[1] in {"core", "testing"} or module == FACE:
        return False
    path = Path(*parts[1:])
    return path.with_suffix(".py") in package or path / "__init__.py" in package


def hops() -> dict[str, int | float]:
    """Return the calls and files of a save and of restores, until the first byte is copied."""
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from walk import END_OF_SAVE, FIRST_BYTES, Walk  # noqa: PLC0415  needs JAX's flags and the path
    from world import World  # noqa: PLC0415

    state: dict[str, object] = {"position": 4}
    counted: dict[str, int | float] = {}

    def count(name: str, walk: Walk) -> None:
        counted[f"{name}: calls across files"] = walk.hops
        counted[f"{name}: files"] = len(walk.modules)

    for tier, end in FIRST_BYTES.items():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            world = World(Path(folder))
            with world.open_both() as saving:
                saving.restore(state=world.state(0), host_state=dict(state))
                saving.save(step=1, state=world.state(1), host_state=dict(state))
                saving.wait_until_finished()
                with Walk(END_OF_SAVE) as walk:
                    saving.save(step=2, state=world.state(2), host_state=dict(state))
                if tier == "local":
                    count("save", walk)
                saving.wait_until_finished()
            if tier == "persistent":
                world.lose_ram()
            with world.open_both() as restoring, Walk(end) as walk:
                restoring.restore(state=world.state(0), host_state=dict(state))
            count(f"restore, {tier}", walk)
    return counted


def figures_of(revision: str) -> dict[str, int | float]:
    """Return the figures of a revision, of its files alone."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", ROOT, "archive", revision],
            check=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        return Tree(Path(folder)).figures()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="REVISION", help="print its figures beside")
    against: str | None = parser.parse_args().against
    before = {} if against is None else figures_of(against)
    now = {**Tree(ROOT).figures(), **hops()}
    print(f"{'':42}{'now':>10}{(against or '')[:9]:>12}")
    for name, value in now.items():
        then = f"{before[name]:12,}" if name in before else ""
        print(f"{name:42}{value:10,}{then}")


if __name__ == "__main__":
    main()
