"""Rules of the house: where lines belong, and that no name or bound has two owners.

Import directions are contracts in ``pyproject.toml``, which ``make check`` holds too.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

from findings import ROOT, differing

from emergency_ckpt.types import TierName

PACKAGE = ROOT / "emergency_ckpt"
PRINTS = "tools/cli/output.py"
MAX_FUNCTION_LINES = 70
MAX_TEST_NAME_CHARS = 60
MOST_FILES_WITH_TIER_LITERALS = 10

# A local name says what its value is. These say how the value was got.
VAGUE_NAMES = {"found", "each", "held", "told", "given", "known", "kept", "left", "wanted"}
MOST_VAGUE_NAMES = 253
"""The uses of ``VAGUE_NAMES`` in the package, with the fields of these names. It only falls."""

# Names that stand in two adapters because users of each know them from the project that it adapts.
FACES = {"CheckpointManager", "CheckpointManagerOptions", "EmergencyCheckpointer"}

# Public names that only users call, or the standard library.
CALLED_BY_USERS = {
    "axlearn.py": {"checkpoint_paths", "ckpt_dir"},
    "extras/metrics.py": {"record_for_jax"},
    "extras/prometheus_server.py": {"handle_error", "service_actions"},
    "extras/pace.py": {"AdaptiveInterval"},
    "maxtext.py": {"create_checkpoint_manager", "from_maxtext", "with_data"},
    "orbax/manager.py": {"best_step", "in_primary_slice"},
    "orbax/v1/training.py": {"save_checkpointables", "on_complete"},
}

# What has no public name: JAX's coordination client and key of programs, a Ray worker's context.
PRIVATE_MODULES = {
    "cluster/coordination.py": {"jax._src.distributed"},
    "extras/notices.py": {"ray.train.v2._internal.execution.context"},
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
    "extras/notices.py": {"TEXT_LIMIT_CHARS"},
    "core/restore/plan_types.py": {"MAX_REASON_CHARS"},
    "restore/rounds.py": {"LEADER_LIMIT_CHARS"},
    "save/persistent/rounds.py": {"REPORT_LIMIT_CHARS"},
    "tools/deploy.py": {"LABEL_LIMIT_CHARS"},
    "tools/report/lives.py": {"MAX_TEXT_CHARS"},
    "save/vote.py": {"BALLOT_LIMIT_CHARS"},
    "transfer/client.py": {"MAX_REQUEST_BYTES", "MIN_REQUEST_BYTES"},
    "transfer/wire.py": {"MAX_EXCERPT_CHARS"},
}

# The names of the tiers as users, events and metrics write them. All else asks the tier, or says
# ``types.LOCAL`` and ``types.PERSISTENT``.
TIER_LITERALS = {
    "checkpointer.py",
    "config/settings.py",
    "extras/metrics.py",
    "orbax/manager.py",
    "events.py",
    "types.py",
}

# Tables whose keys are points of events.
POINT_TABLES = {
    "events.py",
    "extras/metrics.py",
    "tools/report/lives.py",
    "tools/report/spans.py",
    "tools/cli/ls/explain.py",
}

MONITORING = ROOT / "docs" / "monitoring.md"
Function = ast.FunctionDef | ast.AsyncFunctionDef
SIZE = re.compile(r"(MAX|MIN)_.*(BYTES|CHARS|DEPTH|LENGTH)$|(.*_)?(LIMIT|MOST)_(BYTES|CHARS)$")
POINT = re.compile(r"[a-z]+(\.[a-z_]+){1,2}")
PRIVATE_MODULE = re.compile(r"\w+(\.\w+)*\._\w+(\.\w+)*")
TEST = re.compile(r"^\s*(?:async )?def (test_\w+)\(", re.M)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def files_of_package() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def short(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


Node = ast.Call | ast.ClassDef | ast.Constant | ast.Import | ast.ImportFrom | ast.Module | Function


@functools.cache
def nodes() -> tuple[tuple[str, Node], ...]:
    """Return the nodes of the package that a check asks for, with their files."""
    return tuple(
        (short(path), node)
        for path in files_of_package()
        for node in ast.walk(parsed(path))
        if isinstance(node, Node)
    )


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
    return set[str]().union(*map(names_used_in, paths))


@functools.cache
def names_used_in(path: Path) -> set[str]:
    used: set[str] = set()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                used.add(name)
            case ast.alias(name=name, asname=str()):
                used.add(name)
            case ast.Constant(value=str(text)) if len(text) < 80:
                used.update(re.findall(r"\w+", text) if " " not in text else ())
            case _:
                pass
    return used


def constants_of(path: Path) -> Iterator[str]:
    for node in parsed(path).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name.lstrip("_")
            case _:
                pass


def check_tiers_are_named_by_literals_at_the_faces_only() -> Iterator[str]:
    names = get_args(TierName)
    files = {
        path for path, node in nodes() if isinstance(node, ast.Constant) and node.value in names
    }
    yield from differing(files, TIER_LITERALS, "TIER_LITERALS")
    if len(TIER_LITERALS) > MOST_FILES_WITH_TIER_LITERALS:
        yield f"{len(TIER_LITERALS)} files, expected {MOST_FILES_WITH_TIER_LITERALS} at most"


def check_functions_are_short() -> Iterator[str]:
    for path, node in nodes():
        if isinstance(node, Function):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{path}: {node.name} has {lines} lines, over {MAX_FUNCTION_LINES}"


def check_local_names_say_what_a_value_is() -> Iterator[str]:
    uses = Counter(short(path) for path in files_of_package() for _ in vague_names_in(path))
    if uses.total() > MOST_VAGUE_NAMES:
        names, most = ", ".join(sorted(VAGUE_NAMES)), ", ".join(dict(uses.most_common(3)))
        yield f"{uses.total()} uses of {names}, expected {MOST_VAGUE_NAMES} at most: see {most}"


def vague_names_in(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) if name in VAGUE_NAMES:
                yield name
            case _:
                pass


def check_bounds_have_one_owner_each() -> Iterator[str]:
    owners = Counter(
        name
        for path in files_of_package()
        for name in set(constants_of(path))
        if name.startswith(("MAX_", "MIN_"))
    )
    if owners["MAX_PROCESSES"] != 1:
        yield "MAX_PROCESSES: it should have one owner"
    yield from (f"{name}: {count} owners" for name, count in owners.items() if count > 1)


def check_sizes_of_foreign_input_are_bounded_in_core_limits() -> Iterator[str]:
    elsewhere = {
        f"{short(path)}: {name}"
        for path in files_of_package()
        if short(path) != "core/limits.py"
        for name in constants_of(path)
        if SIZE.match(name)
    }
    own = {f"{path}: {name}" for path, names in OWN_SIZES.items() for name in names}
    yield from differing(elsewhere, own, "OWN_SIZES")


def check_lines_of_commands_have_escapes() -> Iterator[str]:
    """Names of others can hold a terminal's commands, or a newline and a forged line."""
    for path, node in nodes():
        match node:
            case ast.Call(func=ast.Name("print"), args=[] | [ast.Constant()]):
                pass
            case ast.Call(func=ast.Name("print"), args=[ast.Call(func=ast.Name("printable"))]):
                pass
            case ast.Call(func=ast.Name("print")) if path != PRINTS:
                yield f"{path}: line {node.lineno}: use print_line, which has escapes"
            case _:
                pass


def check_public_definitions_are_used_outside_the_tests() -> Iterator[str]:
    folders = ("benchmarks", "docs", "examples")
    others = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    used = names_used([*files_of_package(), *others])
    for path in files_of_package():
        allowed = CALLED_BY_USERS.get(short(path), set())
        for node in definitions(parsed(path).body):
            if node.name not in used and node.name not in allowed:
                yield f"{short(path)}: {node.name} is used by tests at most"


def check_names_that_only_users_call_are_needed_on_the_list() -> Iterator[str]:
    used = names_used(files_of_package())
    for name in {name for names in CALLED_BY_USERS.values() for name in names} & used:
        yield f"{name}: the package uses it, so it need not be in CALLED_BY_USERS"


def check_public_classes_have_names_of_their_own() -> Iterator[str]:
    owners: dict[str, list[str]] = defaultdict(list)
    for path in files_of_package():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(short(path))
    for name, files in owners.items():
        if len(files) > 1 and name not in FACES:
            yield f"{name}: in {', '.join(files)}"


def check_private_modules_are_named_where_documented() -> Iterator[str]:
    named = {
        f"{path}: {node.value}"
        for path, node in nodes()
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and PRIVATE_MODULE.fullmatch(node.value)
    }
    listed = {f"{path}: {name}" for path, names in PRIVATE_MODULES.items() for name in names}
    yield from differing(named, listed, "PRIVATE_MODULES")
    architecture = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    for path in PRIVATE_MODULES:
        if f"`{path.removesuffix('.py')}`" not in architecture:
            yield f"{path}: missing in ARCHITECTURE.md"


def check_imports_have_no_circles() -> Iterator[str]:
    """Of modules, in functions and for types alone too; a package is its ``__init__``."""
    paths = {path: _module(path) for path, _ in nodes()}
    modules = set(paths.values())
    imports: dict[str, set[str]] = {module: set() for module in modules}
    for path, node in nodes():
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                imports[paths[path]].add(below if below in modules else node.module)
    sorter = graphlib.TopologicalSorter(
        {module: (names & modules) - {module, PACKAGE.name} for module, names in imports.items()}
    )
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        yield " <- ".join(error.args[1])


def _module(path: str) -> str:
    parts = Path(PACKAGE.name, path).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def check_no_private_module_of_others_is_imported() -> Iterator[str]:
    for path, node in nodes():
        match node:
            case ast.Import(names=aliases):
                modules = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case _:
                continue
        for name in modules:
            if re.search(r"(^|\.)_(?!_)", name) and not name.startswith("emergency_ckpt."):
                yield f"{path}: {name}: use private_names"


def check_private_names_are_imported_within_their_folder_only() -> Iterator[str]:
    for path, node in nodes():
        folder = ".".join(("emergency_ckpt", *Path(path).parent.parts))
        if isinstance(node, ast.ImportFrom) and node.module not in (None, folder):
            for alias in node.names:
                if re.match(r"_(?!_|native$)", alias.name):
                    yield f"{path}: line {node.lineno}: {alias.name} of {node.module}"


def check_events_are_those_of_the_operations_page() -> Iterator[str]:
    emitted: set[str] = set()
    for path, node in nodes():
        if path.startswith("tools/launch/"):
            continue  # it has a log of its own
        match node:
            case ast.Call(func=ast.Attribute(attr="emit" | "_emit" | "made"), args=[name, *_]):
                emitted |= literals(name)
            case _:
                pass
    listed = {name for names, _ in listed_events() for name in names}
    yield from differing(emitted, listed, "docs/monitoring.md")


def check_points_in_tables_are_those_of_the_operations_page() -> Iterator[str]:
    """A point that no event has counts nothing, warns of nothing, and is not missed."""
    rows = list(listed_events())
    kinds = {name.partition(".")[0] for names, _ in rows for name in names}
    points = {f"{name}.{word}" for names, words in rows for name in names for word in words}
    # The page names the events of a launcher outside of the table.
    points |= set(re.findall(r"`([a-z_.]+)`", MONITORING.read_text("utf-8")))
    for path, node in nodes():
        match node:
            case ast.Constant(value=str(text)) if path in POINT_TABLES and POINT.fullmatch(text):
                if text.partition(".")[0] in kinds and text not in points:
                    yield f"{path}: line {node.lineno}: no event has the point {text}"
            case _:
                pass


def listed_events() -> Iterator[tuple[list[str], list[str]]]:
    """Yield the names in each row of the table of events, and its stages and causes."""
    table = MONITORING.read_text("utf-8").split("| event | fields | meaning |")[1]
    for line in table.splitlines():
        if line.startswith("| `"):
            yield (
                re.findall(r"`([a-z_.]+)`", line.split("|")[1]),
                re.findall(r'"([a-z_]+)"', line),
            )


def literals(name: ast.expr) -> set[str]:
    """Return the names that an expression chooses from; one that is computed is a finding."""
    match name:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp(body=body, orelse=orelse):
            return literals(body) | literals(orelse)
        case _:
            return {f"the name of an event is computed: {ast.unparse(name)}"}


def check_docstrings_name_their_noun() -> Iterator[str]:
    for path, node in nodes():
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            text = ast.get_docstring(node) or ""
            if re.match(r"(What|Who|Whom|Whose|Whether|Where|When|How)\b", text):
                yield f"{path}: {text.splitlines()[0]}"


def check_names_of_tests_are_short_and_begin_without_an_article() -> Iterator[str]:
    for folder in ("tests", "tests_tf"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in TEST.findall(path.read_text("utf-8")):
                if len(name) > MAX_TEST_NAME_CHARS or re.match(r"test_(a|an|the)_", name):
                    yield f"{path.relative_to(ROOT)}: {name}"
