"""A reader of both pages of formats, written from them alone: it shares no code with the package.

``read_ramdisk`` and ``read_storage`` return plain values, and what is wrong as texts in ``faults``.
They change nothing. Tensors in storage are not read.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import google_crc32c

PAGE = Path(__file__).parents[1] / "emergency_ckpt" / "ram" / "FORMAT.md"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_LIFE = re.compile(r"([0-9]{12})-")
_PLAIN = re.compile(r"[0-9]{12}-orbax(-[0-9a-f]+)?")
_STEP = re.compile(r"(?:(.+)_)?([0-9]{1,19})")
_VERSION = re.compile(r"host_state/log/([0-9]{12})\.json")
_MARKER = re.compile(r"host_state/([0-9]{1,19})/marker\.json")
_DOCUMENT = re.compile(r"process_(\d{5,7})_of_(\d{5,7})\.json")
_MAX = (1 << 63) - 1
_KEPT = 8
_ITEMS = ("default", "state", "items")
FOREIGN = "another program wrote it, and the log does not name it"


class Damaged(ValueError):
    """A file that must not be used; its text says why."""


class OtherFormat(Exception):
    """A file of a later version of the package: nothing older may be used in its place."""


def _require(condition: object, problem: str) -> None:
    if not condition:
        raise Damaged(problem)


# JSON files, whose digests are of bytes.


def raw_fields(data: bytes) -> dict[str, bytes]:
    """Return the bytes of the value of each field of an object."""
    decoder, text = json.JSONDecoder(), data.decode()
    _require(text.startswith("{"), "not an object")
    found: dict[str, bytes] = {}
    at = 1
    while not text.startswith("}", at):
        name, at = decoder.raw_decode(text, at)
        _require(isinstance(name, str) and text.startswith(":", at), "not an object")
        _, end = decoder.raw_decode(text, at + 1)
        found[name] = text[at + 1 : end].encode()
        at = end + 1 if text.startswith(",", end) else end
        _require(at > end or text.startswith("}", at), "not an object")
    _require(at == len(text) - 1, "something follows the object")
    return found


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


_FORMATS = {"version": 2}
"""Of the kinds whose format is not 1."""


def _digested(data: bytes, kind: str, fields: set[str] | None = None) -> dict[str, bytes]:
    """Return the raw fields of an envelope of the format of ``kind`` whose digest fits."""
    found = raw_fields(data)
    version = json.loads(found.get("format", b"null"))
    is_number = isinstance(version, int) and not isinstance(version, bool)
    _require(is_number and version > 0, f"format {version!r}")
    is_other = version != _FORMATS.get(kind, 1)
    has_fields = is_other or set(found) == (fields or {"format", "digest", kind})
    _require(has_fields, f"fields {sorted(found)}")
    covered = (b"%d\n" % version if version > 1 else b"") + found[kind]
    _require(json.loads(found["digest"]) == sha(covered), "the digest differs")
    if is_other:
        raise OtherFormat(f"format {version}")
    return found


def _save_of(value: Mapping[str, Any]) -> Save:
    _require(set(value) == {"step", "incarnation", "run_id"}, "no save")
    save = Save(value["step"], value["incarnation"], value["run_id"])
    _require(isinstance(save.step, int) and 0 <= save.step <= _MAX, "its step is out of bounds")
    _require(_NAME.fullmatch(save.incarnation) and _NAME.fullmatch(save.run_id), "no plain name")
    return save


class Save(NamedTuple):
    """The identity of a save."""

    step: int
    incarnation: str
    run_id: str


# Incarnations and the chain.


def number_of(incarnation: str) -> int:
    """Return the number of a life; 0 for a name of another form."""
    found = _LIFE.match(incarnation)
    return int(found[1]) if found else 0


def check_chain(chain: Mapping[str, Any]) -> None:
    """Raise Damaged for a chain that contradicts itself."""
    _require(set(chain) == {"head", "start_step", "ancestors", "oldest_step"}, "no chain")
    names = [chain["head"], *(each["incarnation"] for each in chain["ancestors"])]
    _require(number_of(names[0]) > 0 and len(names) <= 65, "its head or length is out of bounds")
    _require(all(a > b for a, b in itertools.pairwise(names)), "its lives do not fall")


def allows(chain: Mapping[str, Any] | None, step: int, incarnation: str) -> bool:
    """Return whether the save counts by the chain."""
    if chain is None:
        return True
    life = incarnation.partition(".")[0]
    number, head = number_of(life), number_of(chain["head"])
    is_plain = _PLAIN.fullmatch(life) is not None
    if number >= head:
        return number > head or life == chain["head"] or is_plain
    ancestors = [(each["incarnation"], each["last_step"]) for each in chain["ancestors"]]
    no_greater = [each for each in ancestors if number_of(each[0]) <= number]
    if not no_greater:
        return step <= chain["oldest_step"]
    if is_plain:
        return step <= no_greater[0][1]
    same = [each for each in ancestors if number_of(each[0]) == number]
    own = [each for each in same if each[0] == life]
    if all(_PLAIN.fullmatch(name) for name, _ in same):
        own = same
    return bool(own) and step <= own[0][1]


# The ramdisk.


class Shard(NamedTuple):
    """One box of a leaf. ``is_sound``: its bytes have the CRC32C of the manifest."""

    path: str
    box: tuple[tuple[int, int], ...]
    data: bytes
    is_sound: bool


class Slot(NamedTuple):
    """A published slot."""

    number: int
    save: Save
    leaves: list[dict[str, Any]]
    shards: list[Shard]
    writer: dict[str, Any]


class HostState(NamedTuple):
    """A published host state; ``value`` as ``value_of`` returns it."""

    save: Save
    owner: int
    count: int
    value: Any


@dataclasses.dataclass
class Process:
    """A process directory. ``complete``: of its ledger, also of one that is not trusted."""

    path: Path
    ledger: dict[str, Any] | None = None
    complete: Save | None = None
    slots: list[Slot] = dataclasses.field(default_factory=list)
    host_states: list[HostState] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)


@functools.cache
def item_bytes() -> Mapping[str, int]:
    """Return the stored size of each dtype, from the table of the page."""
    rows = re.findall(r"^\| (\d+) \| (`.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return {name: int(size) for size, row in rows for name in re.findall(r"`(\w+)`", row)}


def read_ramdisk(local_dir: Path, run_id: str) -> list[Process]:
    """Return the process directories of a run. Nobody may write meanwhile."""
    run = local_dir / run_id
    found = sorted(run.iterdir()) if run.is_dir() else []
    return [read_process(path, run_id) for path in found if path.is_dir()]


def read_process(path: Path, run_id: str) -> Process:
    """Return what one process directory holds that may be used."""
    found = Process(path)
    for below, read in (
        ("ledger.json", _read_ledger),
        ("slot_*.manifest.json", _read_slot),
        ("host_state/*/process_*.json", _read_host_state),
    ):
        for file in sorted(path.glob(below)):
            name = file.relative_to(path).as_posix()
            try:
                _require(file.is_file() and not file.is_symlink(), "not a file")
                read(found, file, file.read_bytes(), run_id)
            except (ValueError, KeyError, TypeError, OtherFormat, RecursionError) as error:
                found.faults.append(f"{name}: {error}")
    return found


def _read_ledger(found: Process, file: Path, data: bytes, run_id: str) -> None:
    del file
    ledger = json.loads(_digested(data, "ledger")["ledger"])
    fields = {"incarnation", "chain", "complete"}
    _require(fields <= set(ledger) <= fields | {"finite", "restored", "stored"}, "no ledger")
    restored = ledger.get("restored", {"save": None, "lives": 1})
    _require(set(restored) == {"save", "lives"} and restored["lives"] > 0, "no restored save")
    for save in filter(None, (ledger.get("finite"), ledger.get("stored"), restored["save"])):
        _require(_save_of(save).run_id == run_id, "it is of another run")
    complete = None if ledger["complete"] is None else _save_of(ledger["complete"])
    _require(complete is None or complete.run_id == run_id, "it is of another run")
    _require(not ledger["incarnation"] or _NAME.fullmatch(ledger["incarnation"]), "no plain name")
    if ledger["chain"] is not None:
        check_chain(ledger["chain"])
    found.complete = complete
    found.ledger = ledger


def _read_slot(found: Process, file: Path, data: bytes, run_id: str) -> None:
    _require(
        re.fullmatch(r"slot_(0|[1-9][0-9]?)\.manifest\.json", file.name), "no name of a manifest"
    )
    body = raw_fields(_digested(data, "manifest")["manifest"])
    _require(set(body) == {"contents", "contents_digest", "writer"}, "no manifest")
    _require(json.loads(body["contents_digest"]) == sha(body["contents"]), "the digest differs")
    contents, writer = json.loads(body["contents"]), json.loads(body["writer"])
    _require(set(contents) == {"save", "leaves", "shards"}, "no contents")
    numbers = {"process_index", "process_count", "slice_index"}
    _require(set(writer) == {*numbers, "hostname"}, "no writer")
    _require(all(0 <= writer[name] <= _MAX for name in numbers), "its writer is out of bounds")
    save = _save_of(contents["save"])
    _require(save.run_id == run_id, "it is of another run")
    leaves, shards = contents["leaves"], contents["shards"]
    for leaf in leaves:
        _check_leaf(leaf)
    _require(_rises([leaf["path"] for leaf in leaves]), "its leaves are not in order")
    _require(_rises([(shard["leaf"], shard["box"]) for shard in shards]), "shards not in order")
    slot = file.with_name(file.name.split(".")[0] + ".bin")
    _require(slot.is_file() and not slot.is_symlink(), "its slot is gone")
    stored, end, read = slot.read_bytes(), 0, list[Shard]()
    for shard in shards:
        end = _check_shard(shard, leaves, end)
        part = stored[shard["offset"] : end]
        _require(len(part) == shard["nbytes"], "its slot is too short")
        is_sound = google_crc32c.value(part) == shard["crc32c"]
        box = tuple((start, stop) for start, stop in shard["box"])
        read.append(Shard(leaves[shard["leaf"]]["path"], box, part, is_sound))
        if not is_sound:
            found.faults.append(f"{slot.name}: CRC32C of {read[-1].path} {box} differs")
    found.slots.append(Slot(int(slot.stem[5:]), save, leaves, read, writer))


def _rises(values: Sequence[Any]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


def _check_leaf(leaf: Mapping[str, Any]) -> None:
    _require(set(leaf) == {"path", "dtype", "global_shape", "key_impl"}, "no leaf")
    _require(leaf["dtype"] in item_bytes() and len(leaf["path"]) <= 4096, "no leaf")
    shape = leaf["global_shape"]
    _require(len(shape) <= 32 and all(0 <= size <= _MAX for size in shape), "no shape")
    _require(leaf["key_impl"] is None or len(leaf["key_impl"]) <= 255, "no key_impl")


def _check_shard(shard: Mapping[str, Any], leaves: Sequence[Mapping[str, Any]], end: int) -> int:
    """Return the end of a shard in its slot."""
    _require(set(shard) == {"leaf", "box", "offset", "nbytes", "crc32c"}, "no shard")
    _require(0 <= shard["leaf"] < len(leaves), "it is of no leaf")
    leaf, box = leaves[shard["leaf"]], shard["box"]
    _require(len(box) == len(leaf["global_shape"]), "its box has another rank")
    for (start, stop), size in zip(box, leaf["global_shape"], strict=True):
        _require(0 <= start <= stop <= size, "its box is outside of the leaf")
    elements = math.prod(stop - start for start, stop in box)
    _require(shard["nbytes"] == elements * item_bytes()[leaf["dtype"]], "its length does not fit")
    _require(shard["offset"] % 64 == 0 and shard["offset"] >= end, "its offset does not fit")
    return shard["offset"] + shard["nbytes"]


def _read_host_state(found: Process, file: Path, data: bytes, run_id: str) -> None:
    state = _host_state(data, file.name)
    _require(file.parent.name == f"{state.save.incarnation}-{state.save.step}", "of another save")
    _require(state.save.run_id == run_id, "it is of another run")
    found.host_states.append(state)


def _host_state(data: bytes, name: str) -> HostState:
    fields = raw_fields(data)
    expected = {"schema_version", "save", "owner", "count", "digest", "payload"}
    _require(expected <= set(fields) <= {*expected, "orbax"}, "no host state")
    _require(fields["schema_version"] == b"1", "another schema_version")
    _require(json.loads(fields["digest"]) == _digest_of(fields), "the digest differs")
    owner, count = json.loads(fields["owner"]), json.loads(fields["count"])
    _require(0 <= owner < count <= 1_000_000, "its owner is out of bounds")
    _require(name == f"process_{owner:05d}_of_{count:05d}.json", "of another process")
    value = value_of(json.loads(fields["payload"]))
    return HostState(_save_of(json.loads(fields["save"])), owner, count, value)


def _digest_of(fields: Mapping[str, bytes]) -> str:
    return sha(fields["payload"] + fields.get("orbax", b""))


def value_of(value: Any) -> Any:
    """Return the value of a payload; an array as its dtype, shape and bytes."""
    if isinstance(value, list):
        return [value_of(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items())) if len(value) == 1 else ("", None)
    if kind in _OTHER_VALUES:
        return _OTHER_VALUES[kind](inner)
    return {key: value_of(each) for key, each in value.items()}


_OTHER_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "__bytes__": lambda text: base64.b64decode(text, validate=True),
    "__tuple__": lambda values: tuple(map(value_of, values)),
    "__float__": lambda text: struct.unpack(">d", binascii.unhexlify(text))[0],
    "__int__": lambda text: int(text, 16),
    "__dict__": lambda pairs: {value_of(key): value_of(each) for key, each in pairs},
    "__array__": lambda array: (
        array["dtype"],
        tuple(array["shape"]),
        base64.b64decode(array["data"], validate=True),
    ),
    "__state__": value_of,
}


# Storage.


class Files(Protocol):
    """The files of a persistent directory, by their names below it."""

    def names(self) -> list[str]: ...
    def read(self, name: str) -> bytes: ...


class DirectoryFiles:
    """The files of a directory of a file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> list[str]:
        found = (path for path in self._root.rglob("*") if path.is_file())
        return sorted(path.relative_to(self._root).as_posix() for path in found)

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()


@dataclasses.dataclass
class StoredStep:
    """One step: of an entry, or of a folder that no entry names.

    Attributes:
      state: of its entry; empty without one.
      tensors, documents: its folders, here and below ``host_state``.
      marker: its fields; None for a step of plain Orbax, and where there is a ``problem``.
      problem: why it cannot be used.
      faults: what differs from the marker: documents, checksums, the item's manifest.
      counts: it is complete or marked, the chain allows it, and it has no problem.
    """

    step: int
    incarnation: str
    state: str
    tensors: str
    documents: str
    marker: dict[str, Any] | None = None
    problem: str = ""
    faults: list[str] = dataclasses.field(default_factory=list)
    counts: bool = False


@dataclasses.dataclass
class Storage:
    """A persistent directory.

    Attributes:
      number: of the newest version of its log; 0 without any.
      table: the fields of the newest version that can be used, with all entries as ``steps``.
      steps: of the entries and of other folders, oldest first.
      garbage: steps of saves that did not end.
      traces: steps of which there is an entry or a marker.
      refusal: why nothing may be restored from here, whatever the steps.
    """

    number: int = 0
    table: dict[str, Any] | None = None
    steps: list[StoredStep] = dataclasses.field(default_factory=list)
    garbage: list[int] = dataclasses.field(default_factory=list)
    traces: set[int] = dataclasses.field(default_factory=set)
    faults: list[str] = dataclasses.field(default_factory=list)
    refusal: str = ""

    @property
    def counting(self) -> list[StoredStep]:
        """Return the steps that count, oldest first."""
        return [each for each in self.steps if each.counts]


def read_storage(files: Files, *, is_bucket: bool = False) -> Storage:
    """Return what a persistent directory holds."""
    return _StorageReader(files, is_bucket).read()


class _StorageReader:
    def __init__(self, files: Files, is_bucket: bool) -> None:
        self._files = files
        self._names = frozenset(files.names())
        self._is_bucket = is_bucket
        self._greatest = 0

    def read(self) -> Storage:
        found = Storage()
        try:
            self._read_log(found)
            self._read_steps(found)
        except OtherFormat as error:
            found.refusal = f"another version of this package wrote it: {error}"
        except Damaged as error:
            found.refusal = str(error)
        for each in found.steps:
            faults = [each.problem, *each.faults] if each.problem else each.faults
            found.faults += [f"step {each.step}: {fault}" for fault in faults]
        return found

    def _data(self, name: str) -> bytes | None:
        return self._files.read(name) if name in self._names else None

    def _is_in(self, folder: str) -> bool:
        return any(name.startswith(f"{folder}/") for name in self._names)

    def _value(self, data: bytes, kind: str) -> bytes:
        """Return the bytes of the value of a file. Damaged, OtherFormat."""
        try:
            return _digested(data, kind, {"format", "digest", kind})[kind]
        except (ValueError, RecursionError) as error:
            raise Damaged(str(error)) from error

    # The log.

    def _read_log(self, found: Storage) -> None:
        numbers = sorted(int(name[1]) for name in map(_VERSION.fullmatch, self._names) if name)
        numbers = [number for number in numbers if number > 0]
        if not numbers:
            return
        while numbers and found.table is None:
            found.number = numbers[-1]
            for number in range(found.number, max(0, found.number - _KEPT), -1):
                if number not in numbers:  # all above the gap are damaged, and do not count
                    numbers = [n for n in numbers if n < number]
                    found.number = 0
                    break
                try:
                    found.table = self._table(number)
                    break
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    found.faults.append(f"version {number}: {error}")
            else:
                break
        table = found.table
        if table is None:
            return
        found.traces |= {each["step"] for each in table["steps"] if each["state"] == "complete"}
        lives = [table["incarnation"], *(each["incarnation"] for each in table["steps"])]
        lives += [table["chain"]["head"]] if table["chain"] else []
        self._greatest = max(table["greatest"], *map(number_of, lives))

    def _table(self, number: int) -> dict[str, Any]:
        data = self._data(f"host_state/log/{number:012d}.json")
        _require(data is not None, f"version {number} is gone")
        assert data is not None
        _require(len(data) <= 64 << 20, "it is too large")
        given = json.loads(self._value(data, "version"))
        defaults: dict[str, Any] = {"writer": "", "chain": None, "steps": [], "greatest": 0}
        needed = {"number", "run_id", "from_dir", "incarnation"}
        _require(needed <= set(given) <= needed | set(defaults), f"fields {sorted(given)}")
        table = defaults | given
        _require(table["number"] == number, "it is another version")
        _require(number_of(table["incarnation"]), "its incarnation has no number")
        if table["chain"] is not None:
            check_chain(table["chain"])
        table["steps"] = [_entry(each) for each in table["steps"]]
        keys = [(each["step"], each["incarnation"]) for each in table["steps"]]
        _require(_rises(keys), "its steps are not in order")
        complete = [each["step"] for each in table["steps"] if each["state"] == "complete"]
        _require(_rises(complete), "it has two complete steps of one number")
        return table

    # Steps.

    def _read_steps(self, found: Storage) -> None:
        entries = found.table["steps"] if found.table else []
        chain = found.table["chain"] if found.table else None
        found.traces |= {int(name[1]) for name in map(_MARKER.fullmatch, self._names) if name}
        for entry in entries:
            step = self._of_entry(entry)
            if entry["state"] == "complete":
                step.counts = not step.problem and allows(chain, step.step, step.incarnation)
            found.steps.append(step)
        is_named = {
            _own_folder(entry) for entry in entries if self._is_bucket or entry["state"] != "hidden"
        }
        listed = {entry["step"] for entry in entries}
        for number, folders in self._folders(is_named).items():
            if number in listed:
                continue
            left = sorted(folders, key=lambda name: self._writer_of(name) is None)
            step = self._marked(number, left)
            if step is None and self._is_garbage(number, left[0]):
                found.garbage.append(number)
                continue
            step = step or self._plain(number, left)
            if step is not None and entries and not (step.marker or step.problem):
                step.problem = "unmarked" if self._writer_of(step.tensors) else FOREIGN
            if step is not None:
                step.counts = not step.problem and allows(chain, number, step.incarnation)
                found.steps.append(step)
        found.steps.sort(key=lambda each: (each.step, each.incarnation))
        found.garbage.sort()

    def _writer_of(self, folder: str) -> str | None:
        return _writer(self._data(f"{folder}/_CHECKPOINT_METADATA"))

    def _folders(self, known: set[str]) -> dict[int, list[str]]:
        """Return the other folders that may be each step, the plain number first."""
        kinds: dict[str, dict[int, list[str]]] = {}
        for name in sorted({name.split("/")[0] for name in self._names if "/" in name} - known):
            match = _STEP.fullmatch(name)
            if match is None or int(match[2]) > _MAX:
                continue
            kind = "" if name == str(int(match[2])) else f"_{match[1] or ''}"
            kinds.setdefault(kind, {}).setdefault(int(match[2]), []).append(name)
        others = [
            kind
            for kind, steps in kinds.items()
            if kind and any(self._is_of_orbax(name) for names in steps.values() for name in names)
        ]
        _require(len(others) <= 1, f"steps of several kinds: {others}")
        found: dict[int, list[str]] = {}
        for kind in ["", *others]:
            for number, names in kinds.get(kind, {}).items():
                found.setdefault(number, []).extend(names)
        return found

    def _is_of_orbax(self, folder: str) -> bool:
        items = ["", *(f"{item}/" for item in _ITEMS)]
        files = ["_CHECKPOINT_METADATA", *(f"{item}_METADATA" for item in items)]
        return any(f"{folder}/{file}" in self._names for file in files)

    def _is_garbage(self, number: int, folder: str) -> bool:
        """Whether a folder without a marker is of a save that did not end."""
        metadata = self._data(f"{folder}/_CHECKPOINT_METADATA")
        may_be_ours = not _fields(metadata) or _writer(metadata) is not None
        return may_be_ours and self._is_in(f"host_state/{number}")

    def _of_entry(self, entry: Mapping[str, Any]) -> StoredStep:
        number, incarnation = entry["step"], entry["incarnation"]
        tensors = [_own_folder(entry)]
        if not self._is_bucket:
            tensors.append(f"{number}.rolled-back-{incarnation}")
        if entry["state"] != "complete":
            tensors.reverse()
        step = StoredStep(
            number, incarnation, entry["state"], _own_folder(entry), str(number), problem="gone"
        )
        if not entry["marker"]:
            return self._of_plain_entry(entry, step, tensors)
        metadata = self._data(f"{step.tensors}/_CHECKPOINT_METADATA")
        for folder in tensors:
            there = self._data(f"{folder}/_CHECKPOINT_METADATA")
            if _writer(there) == incarnation:
                metadata, step.tensors = there, folder
                break
        marker = self._data(f"host_state/{step.documents}/marker.json")
        if marker is None:
            if metadata is None:
                return step
            if _writer(metadata) == incarnation and self._is_in(f"host_state/{step.documents}"):
                step.problem = "its marker is gone"
                return step
            found = self._plain_instead(step)
            is_own = not _fields(metadata) or _writer(metadata) == incarnation
            return found if is_own else _foreign(found)
        if sha(marker) != entry["marker"]:
            step.problem = "its marker is not that of its entry"
            return step
        found = self._check(step, marker, metadata)
        return found if found.marker else _foreign(found)

    def _plain_instead(self, step: StoredStep) -> StoredStep:
        found = self._plain_in(step.step, step.tensors)
        return step if found is None else dataclasses.replace(found, state=step.state)

    def _of_plain_entry(
        self, entry: Mapping[str, Any], step: StoredStep, folders: Sequence[str]
    ) -> StoredStep:
        is_hidden = entry["state"] == "hidden"
        digest = entry["incarnation"].partition("-orbax-")[2]
        again: StoredStep | None = None
        for folder in folders:
            found = self._plain_in(step.step, folder, is_hidden=is_hidden)
            if found is None or found.problem:
                continue
            found.state = entry["state"]
            if found.incarnation.partition("-orbax-")[2] == digest:
                found.incarnation = entry["incarnation"]
                return found
            if folder == step.tensors and entry["state"] == "complete":
                again = _foreign(found)  # another program has written it again
        return again or step

    def _marked(self, number: int, folders: Sequence[str]) -> StoredStep | None:
        """Return the step of folders of which one has a marker; None without one."""
        marker = self._data(f"host_state/{number}/marker.json")
        if marker is None:
            return None
        found = {name: self._data(f"{name}/_CHECKPOINT_METADATA") for name in folders}
        its = [name for name, data in found.items() if _digest(data).encode() in marker and data]
        folder = its[0] if its else folders[0]
        step = self._check(StoredStep(number, "", "", folder, str(number)), marker, found[folder])
        if step.marker and self._is_bucket and f"{folder}/commit_success.txt" not in self._names:
            step.marker, step.problem = None, "Orbax has not committed it"
        return step

    def _check(self, step: StoredStep, data: bytes, metadata: bytes | None) -> StoredStep:
        """Return ``step`` as its marker has it."""
        step.problem = ""
        try:
            fields = json.loads(self._value(data, "marker"))
            save = _save_of(fields["save"])
            _require(save.step == step.step, "its marker is of another step")
            expected = fields["tensors"]["metadata"], fields["tensors"]["manifest"]
            _require(len(fields["digests"]) == len(fields["empty"]), "its marker is no marker")
            items = fields.get("items", ["default"])
            _require(items and not any(re.match(r"\.|.*/|$", each) for each in items), "its items")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            step.problem = f"its marker: {error}"
            return step
        step.incarnation = save.incarnation
        names = [f"{step.tensors}/{item}/manifest.ocdbt" for item in sorted(items)]
        found = [data for data in map(self._data, names) if data is not None]
        manifest = b"".join(found) if found else None
        is_same = (_digest(metadata) == expected[0], _digest(manifest) == expected[1])
        if metadata is None and manifest is None:
            step.problem = "gone"
        elif not any(is_same):
            step.problem = "gone"
            return self._plain_instead(step)
        elif not is_same[0]:
            step.problem = "its _CHECKPOINT_METADATA is damaged"
        if step.problem:
            return step
        step.marker = fields
        step.faults += [] if is_same[1] else ["its manifest.ocdbt is damaged"]
        step.faults += self._document_faults(step, fields)
        return step

    def _document_faults(self, step: StoredStep, marker: Mapping[str, Any]) -> Iterable[str]:
        folder, count = f"host_state/{step.documents}", len(marker["digests"])
        checksums = self._data(f"{folder}/checksums.json")
        if _digest(checksums) != marker["checksums"]:
            yield "its checksums.json is damaged"
        for owner, digest in enumerate(marker["digests"]):
            name = f"process_{owner:05d}_of_{count:05d}.json"
            data = self._data(f"{folder}/{name}")
            try:
                _require(data is not None and sha(data) == digest, "the digest differs")
                assert data is not None
                state = _host_state(data, name)
                _require(state.save == Save(**marker["save"]), "of another save")
                _require((state.value is None) == marker["empty"][owner], "empty, or not")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                yield f"{name}: {error}"

    def _plain(self, number: int, folders: Sequence[str]) -> StoredStep | None:
        found = [self._plain_in(number, folder) for folder in folders]
        return next((each for each in found if each and not each.problem), None)

    def _plain_in(self, number: int, folder: str, *, is_hidden: bool = False) -> StoredStep | None:
        """Return the step of plain Orbax in a folder; None when Orbax has not committed one."""
        end = f"{folder}/commit_success.txt"
        is_committed = end in self._names if self._is_bucket else self._is_in(folder)
        if not (is_hidden or is_committed) or not self._is_of_orbax(folder):
            return None
        digest = hashlib.sha256(self._data(f"{folder}/_CHECKPOINT_METADATA") or b"")
        for item in ("", *(f"{item}/" for item in _ITEMS)):
            manifest = self._data(f"{folder}/{item}manifest.ocdbt")
            if manifest is not None:
                digest.update(manifest)
                break
        incarnation = f"{self._greatest:012d}-orbax-{digest.hexdigest()[:16]}"
        return StoredStep(number, incarnation, "", folder, str(number))


def _foreign(step: StoredStep) -> StoredStep:
    """Return a step of plain Orbax in the place of another one: it does not count."""
    step.problem = step.problem or FOREIGN
    return step


def _entry(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with its defaults. Damaged."""
    defaults = {"state": "complete", "marker": "", "processes": 0}
    defaults |= {"stateful": False, "size_bytes": 0, "saved_s": 0.0, "folder": "", "metrics": None}
    defaults |= {"lives": 0}
    needed = {"step", "incarnation"}
    _require(needed <= set(given) <= needed | set(defaults), f"an entry: {sorted(given)}")
    entry: dict[str, Any] = defaults | dict(given)
    _require(entry["state"] in ("complete", "hidden", "removing"), "an entry of no state")
    _require(isinstance(entry["step"], int) and 0 <= entry["step"] <= _MAX, "an entry of no step")
    _require(_NAME.fullmatch(entry["incarnation"]), "an entry of no plain name")
    _require(re.fullmatch(r"[0-9a-f]{64}|", entry["marker"]), "an entry of no digest")
    named = _STEP.fullmatch(entry["folder"] or str(entry["step"]))
    _require(named and int(named[2]) == entry["step"], "a folder of another step")
    _require(not set(entry["folder"]) & {"/", "\\", "\0"}, "a folder elsewhere")
    return entry


def _own_folder(entry: Mapping[str, Any]) -> str:
    return entry["folder"] or str(entry["step"])


def _digest(data: bytes | None) -> str:
    return "" if data is None else sha(data)


def _fields(metadata: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(metadata or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _writer(metadata: bytes | None) -> Any:
    """Return the incarnation in Orbax's metadata; None when this package did not write them."""
    custom = _fields(metadata).get("custom_metadata")
    ours = custom.get("emergency_ckpt") if isinstance(custom, dict) else None
    return ours.get("incarnation", "") if isinstance(ours, dict) else None
