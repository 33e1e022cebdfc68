"""The rules of the house: where lines belong, and that no name or bound has two owners.

Import directions are contracts in ``pyproject.toml``, which ``make check`` holds.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from emergency_ckpt.types import TierName

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "emergency_ckpt"
MAX_FUNCTION_LINES = 70
MAX_TEST_NAME_CHARS = 60

# Names that stand in two adapters because users of each know them from the project that it adapts.
FACES = {"CheckpointManager", "CheckpointManagerOptions", "EmergencyCheckpointer"}

# Public names that only users call.
CALLED_BY_USERS = {
    "extras/metrics/listeners.py": {"record_for_jax"},
    "extras/pace.py": {"AdaptiveInterval"},
    "axlearn/adapter.py": {"checkpoint_paths", "ckpt_dir"},
    "checkpointer.py": {"failed_saves"},
    "maxtext.py": {"create_checkpoint_manager", "from_maxtext"},
    "orbax/manager.py": {"best_step", "in_primary_slice"},
    "orbax/v1/training.py": {
        *("save_checkpointables", "save_pytree", "save_pytree_async"),
        *("load_pytree", "load_pytree_async", "on_complete", "pytree_metadata"),
    },
}

# What has no public name: JAX's coordination client and key of programs, a Ray worker's context.
PRIVATE_MODULES = {
    "cluster/coordination.py": {"jax._src.distributed"},
    "cluster/notice_sources.py": {"ray.train.v2._internal.execution.context"},
    "tools/simulated_job.py": {"jax._src.cache_key"},
}

# Sizes that bound a module's own work. What comes from another process, a file or a bucket is
# bounded by ``core/limits``.
OWN_SIZES = {
    "cluster/coordination.py": {
        *("ERROR_LIMIT_CHARS", "JOINED_LIMIT_CHARS", "UNREADABLE_LIMIT_CHARS"),
    },
    "cluster/left_processes.py": {"REASON_LIMIT_CHARS"},
    "extras/hang.py": {"PLACE_LIMIT_CHARS", "REASON_LIMIT_CHARS", "STACKS_LIMIT_CHARS"},
    "cluster/notice_sources.py": {"TEXT_LIMIT_CHARS"},
    "core/restore/plan_types.py": {"MAX_REASON_CHARS"},
    "tools/deploy/gke_job.py": {"LABEL_LIMIT_CHARS"},
    "tools/event_fields.py": {"MAX_TEXT_CHARS"},
    "save/vote.py": {"BALLOT_LIMIT_CHARS"},
    "transfer/fetch.py": {"MAX_REQUEST_BYTES", "MIN_REQUEST_BYTES"},
    "transfer/wire.py": {"MAX_EXCERPT_CHARS"},
}

# The names of the tiers as users, events and metrics write them. All else asks the tier, or says
# ``types.LOCAL`` and ``types.PERSISTENT``.
TIER_LITERALS = {
    "axlearn/adapter.py",
    "checkpointer.py",
    "config/settings.py",
    "extras/metrics/listeners.py",
    "extras/metrics/metric_table.py",
    "orbax/manager.py",
    "orbax/plain_options.py",
    "events.py",
    "types.py",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def files_of_package() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def short(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def found(check: Callable[[Path, ast.Module], Iterable[str]]) -> list[str]:
    """Return every finding of ``check`` in the package, with its file."""
    return [
        f"{short(path)}: {finding}"
        for path in files_of_package()
        for finding in check(path, parsed(path))
    ]


def definitions(body: Iterable[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    """Yield public functions and classes, and the public methods of public classes."""
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield node
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body)


def names_used(paths: Iterable[Path]) -> set[str]:
    """Return the names that are read, called, or stand in a string as a name does."""
    used: set[str] = set()
    for path in paths:
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    used.add(name)
                case ast.alias(name=name, asname=str()):
                    used.add(name)
                case ast.Constant(value=str(text)) if len(text) < 80:
                    used.update(re.findall(r"\w+", text) if " " not in text else ())
    return used


def imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def test_tiers_are_named_by_literals_at_the_faces_only() -> None:
    def literals(path: Path, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in get_args(TierName):
                yield ""

    files = {finding.partition(":")[0] for finding in found(literals)}
    assert files == TIER_LITERALS
    assert len(TIER_LITERALS) <= 10


def test_functions_have_at_most_70_lines() -> None:
    def too_long(_: Path, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, Function):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    yield f"{node.name} has {lines} lines"

    assert found(too_long) == []


def constants_of(path: Path) -> Iterator[str]:
    for node in parsed(path).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name.lstrip("_")
            case _:
                pass


def test_bounds_have_one_owner_each() -> None:
    owners = Counter(
        name
        for path in files_of_package()
        for name in set(constants_of(path))
        if name.startswith(("MAX_", "MIN_"))
    )
    assert owners["MAX_PROCESSES"] == 1
    assert {name for name, count in owners.items() if count > 1} == set()


def test_sizes_of_foreign_input_are_bounded_in_core_limits() -> None:
    size = re.compile(r"(MAX|MIN)_.*(BYTES|CHARS|DEPTH|LENGTH)$|(.*_)?(LIMIT|MOST)_(BYTES|CHARS)$")
    elsewhere = {
        f"{short(path)}: {name}"
        for path in files_of_package()
        if short(path) != "core/limits.py"
        for name in constants_of(path)
        if size.match(name)
    }
    assert elsewhere == {f"{path}: {name}" for path, names in OWN_SIZES.items() for name in names}


def test_public_definitions_are_used_outside_the_tests() -> None:
    others = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    used = names_used([*files_of_package(), *others])

    def unused(path: Path, tree: ast.Module) -> Iterator[str]:
        allowed = CALLED_BY_USERS.get(short(path), set())
        for node in definitions(tree.body):
            if node.name not in used and node.name not in allowed:
                yield node.name

    assert found(unused) == []


def test_names_that_only_users_call_are_needed_on_the_list() -> None:
    used = names_used(files_of_package())
    assert {name for names in CALLED_BY_USERS.values() for name in names} & used == set()


def test_public_classes_have_names_of_their_own() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for path in files_of_package():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(short(path))
    twice = {name: files for name, files in owners.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in FACES} == {}


def test_private_modules_are_named_where_documented() -> None:
    private = {
        short(path): {
            node.value
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"\w+(\.\w+)*\._\w+(\.\w+)*", node.value)
        }
        for path in files_of_package()
    }
    assert {path: names for path, names in private.items() if names} == PRIVATE_MODULES
    architecture = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    for path in PRIVATE_MODULES:
        assert f"`{path.removesuffix('.py')}`" in architecture


def test_no_private_module_of_others_is_imported() -> None:
    def foreign(_: Path, tree: ast.Module) -> Iterator[str]:
        for name in imported_modules(tree):
            if re.search(r"(^|\.)_(?!_)", name) and not name.startswith("emergency_ckpt."):
                yield f"{name}: use private_names"

    assert found(foreign) == []


def test_private_names_are_imported_within_their_folder_only() -> None:
    def foreign(path: Path, tree: ast.Module) -> Iterator[str]:
        folder = ".".join(path.relative_to(ROOT).parent.parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module not in (None, folder):
                for alias in node.names:
                    if re.match(r"_(?!_|native$)", alias.name):
                        yield f"line {node.lineno}: {alias.name} of {node.module}"

    assert found(foreign) == []


def test_events_are_those_of_the_operations_page() -> None:
    emitted: set[str] = set()
    for path in files_of_package():
        if short(path).startswith(("tools/demo/", "tools/launch/")):
            continue  # these have logs of their own
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Call(func=ast.Attribute(attr="emit" | "_emit"), args=[name, *_]):
                    emitted |= literals(name)
                case _:
                    pass
    text = (ROOT / "docs" / "operations.md").read_text("utf-8")
    table = text.split("| event | fields | meaning |")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = {name for cell in rows for name in re.findall(r"`([a-z_.]+)`", cell)}
    assert emitted == listed


def literals(name: ast.expr) -> set[str]:
    """Return the names that an expression chooses from; one that is computed fails."""
    match name:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp(body=body, orelse=orelse):
            return literals(body) | literals(orelse)
        case _:
            pytest.fail(f"the name of an event is computed: {ast.unparse(name)}")


def test_docstrings_name_their_noun() -> None:
    def headless(_: Path, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function):
                text = ast.get_docstring(node) or ""
                if re.match(r"(What|Who|Whom|Whose|Whether|Where|When|How)\b", text):
                    yield text.splitlines()[0]

    assert found(headless) == []


def test_names_of_tests_are_short_and_begin_without_an_article() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for folder in ("tests", "tests_tf")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(parsed(path))
        if isinstance(node, Function) and node.name.startswith("test_")
        if len(node.name) > MAX_TEST_NAME_CHARS or re.match(r"test_(a|an|the)_", node.name)
    ]
    assert wrong == []
