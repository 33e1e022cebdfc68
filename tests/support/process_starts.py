"""Which tests start processes, read from their source.

A test starts one if its function or a fixture of it names what does: a function of ``subprocess``
and the like, or a function, class or constant of the tests, of ``verification``, ``benchmarks`` or
the package's tools that leads to one, through as many modules as it takes. The library below the
tools starts none. No list of tests is needed: programs run only where a function starts them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path

from places import JOBS, ROOT, TESTS, VERIFICATION

_STARTS = {
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "concurrent.futures": {"ProcessPoolExecutor"},
    "multiprocessing": {"Pool", "Process", "get_context"},
    "os": {"fork", "forkpty", "popen", "posix_spawn", "posix_spawnp", "system"},
    "pty": {"fork", "spawn"},
    "subprocess": {"Popen", "call", "check_call", "check_output", "getoutput", "run"},
}
_WORDS = re.compile(
    r"\bsubprocess\b|\bmultiprocessing\b|\bcreate_subprocess_|\bProcessPoolExecutor\b|\bpty\b"
    r"|\bfork(pty)?\b|\bposix_spawnp?\b|\bos\.(popen|system)\b"
)
_IMPORT = re.compile(r"^ *(?:from|import) ([\w.]+)(?: import (\([\w\s,]+|[\w ,]+))?", re.M)
# Where a module of the tests is looked for: each folder that a test puts into ``sys.path``. A name
# that several have stands for all of them.
_PATH = (TESTS / "support", JOBS, ROOT, VERIFICATION, *sorted(VERIFICATION.glob("*/")))
_FOLLOWED_IN_PACKAGE = "emergency_ckpt.tools."

_Place = tuple[Path, str]
"""A file, and the name of a definition in it."""


def way_to_a_start(test_file: Path, names: Collection[str]) -> str | None:
    """Return how a test comes to start a process, or None where it starts none.

    Arguments:
      names: the test's function and its fixtures. They are looked for in the test's file and in
        each ``conftest.py`` at or above it.
    """
    files = (test_file, *_conftests(test_file.parent))
    return _way([(file, name) for file in files for name in names])


@functools.cache
def _conftests(folder: Path) -> tuple[Path, ...]:
    above = [each / "conftest.py" for each in (folder, *folder.parents)]
    return tuple(each for each in above if each.is_relative_to(TESTS) and each.exists())


class _Module:
    """What the definitions at the top of a file name: pairs of a module and a name in it.

    No module stands for the file itself.
    """

    def __init__(self, path: Path) -> None:
        self.uses: dict[str, set[tuple[str, str]]] = {}
        modules: dict[str, str] = {}
        names: dict[str, tuple[str, str]] = {}
        text: dict[str, set[str]] = {}
        for statement in ast.parse(path.read_bytes()).body:
            loaded, stored = set[str](), set[str]()
            for node in _nodes(statement):
                match node:
                    case ast.Name(id=name, ctx=ast.Load()):
                        loaded.add(name)
                    case ast.Name(id=name):
                        stored.add(name)
                    case ast.Attribute():
                        loaded.add(_dotted(node))
                    case ast.Import():
                        modules.update({each.asname or each.name: each.name for each in node.names})
                    case ast.ImportFrom(module=str(module)):
                        names.update(
                            {each.asname or each.name: (module, each.name) for each in node.names}
                        )
                    case _:
                        pass
            own = getattr(statement, "name", None)
            for name in stored if own is None else (own,):
                text.setdefault(name, set()).update(loaded)
        for name, used in text.items():
            self.uses[name] = set(_resolved(used, modules, names, text))
        for name, passed_on in names.items():  # a package passes on what its modules define
            self.uses.setdefault(name, set()).add(passed_on)


def _resolved(
    used: Iterable[str],
    modules: Mapping[str, str],
    names: Mapping[str, tuple[str, str]],
    own: Container[str],
) -> Iterator[tuple[str, str]]:
    for name in used:
        owner, _, last = name.rpartition(".")
        if owner in modules:
            yield modules[owner], last
        elif owner in names:
            yield ".".join(names[owner]), last
        elif name in names:
            yield names[name]
        elif name in own:
            yield "", name


def _nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement but for annotations, several times as fast as ``ast.walk``."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        for field, value in node.__dict__.items():
            if field in {"annotation", "returns"}:
                continue
            if isinstance(value, list):
                waiting += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.expr | ast.arguments):
                waiting.append(value)


def _dotted(node: ast.expr) -> str:
    """Return ``a.b`` for the expression ``a.b``; empty for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return ""


_module = functools.cache(_Module)


@functools.cache
def _may_start(path: Path) -> bool:
    """Return whether a file, or one that it imports, has the word for a start anywhere.

    Few do: the others need not be parsed.
    """
    waiting = [path]
    for each in waiting:
        text = each.read_text("utf-8")
        if _WORDS.search(text):
            return True
        for module, names in _IMPORT.findall(text):
            for name in (module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))):
                waiting += [file for file in _files_of(name) if file not in waiting]
    return False


_harmless: set[_Place] = set()
"""Definitions that lead to no start."""


def _way(places: list[_Place]) -> str | None:
    """Return the way from the first of the definitions that leads to a start; None without one."""
    ways: dict[_Place, str] = {place: _named(place) for place in places if place not in _harmless}
    waiting = list(ways)
    for place in waiting:
        if not _may_start(place[0]):
            continue
        for module, name in _module(place[0]).uses.get(place[1], ()):
            if name in _STARTS.get(module, ()):
                return f"{ways[place]}, {module}.{name}"
            for file in _files_of(module) if module else (place[0],):
                found = (file, name)
                if found not in ways and found not in _harmless:
                    ways[found] = f"{ways[place]}, {_named(found)}"
                    waiting.append(found)
    _harmless.update(ways)
    return None


def _named(place: _Place) -> str:
    path, name = place
    return f"{path.relative_to(ROOT)}: {name}"


@functools.cache
def _files_of(module: str) -> tuple[Path, ...]:
    """Return the files of a module whose text is followed."""
    if module.startswith("emergency_ckpt") and not module.startswith(_FOLLOWED_IN_PACKAGE):
        return ()
    relative = Path(*module.split("."))
    candidates = (relative.with_suffix(".py"), relative / "__init__.py")
    return tuple(
        folder / each for folder in _PATH for each in candidates if (folder / each).is_file()
    )
