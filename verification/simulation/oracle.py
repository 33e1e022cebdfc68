"""What must hold, computed from the files by FORMAT.md alone: no code of the planner is used.

``survey`` reads the ramdisks that are left. ``newest_complete`` says which step a restore must not
fall below. The bytes of every shard are compared with what the life that saved it had.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import arrays
import devices
import numpy as np
import storage
from lives import Lives, Save, Tags


@dataclass
class Holdings:
    """What some ramdisks hold of each save.

    Attributes:
      boxes: by save and leaf, how often each element is held with the right bytes.
      host_states: by save and number of processes, how often each owner's is held.
      heads: incarnations that have a record of what was rolled back.
      lives: incarnations of which there is a trace that a restore looks at.
      known: the saves on record as complete.
      torn: published shards whose CRC does not fit: of a flip, or published too early.
      most_slots: in one directory.
      wrong: shards that are published with bytes that nobody saved and a CRC that fits them.
    """

    boxes: dict[Save, dict[str, Any]] = field(default_factory=dict)
    host_states: dict[tuple[Save, int], Counter[int]] = field(default_factory=dict)
    heads: set[str] = field(default_factory=set)
    lives: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    torn: list[Path] = field(default_factory=list)
    known: set[Save] = field(default_factory=set)
    most_slots: int = 0
    files: int = 0


def survey(ram: Path, tags: Tags, *, is_damaged: bool) -> Holdings:
    """Return what the ramdisk of one host holds.

    ``tags``: the life of each incarnation. ``is_damaged``: bits have flipped there.
    """
    found = Holdings()
    for directory in sorted(ram.glob("*/process_*")):
        _read_directory(directory, tags, found, is_damaged=is_damaged)
    return found


def merged(parts: Iterable[Holdings]) -> Holdings:
    """Return what several hosts hold together."""
    found = Holdings()
    for part in parts:
        for save, leaves in part.boxes.items():
            known = found.boxes.get(save)
            found.boxes[save] = (
                leaves if known is None else {name: known[name] + leaves[name] for name in leaves}
            )
        for key, owners in part.host_states.items():
            found.host_states[key] = found.host_states.get(key, Counter()) + owners
        found.heads |= part.heads
        found.lives |= part.lives
        found.wrong += part.wrong
        found.torn += part.torn
        found.known |= part.known
        found.most_slots = max(found.most_slots, part.most_slots)
        found.files += part.files
    return found


def _read_directory(directory: Path, tags: Tags, found: Holdings, *, is_damaged: bool) -> None:
    found.files += sum(1 for path in directory.rglob("*") if path.is_file())
    found.most_slots = max(found.most_slots, sum(1 for _ in directory.glob("slot_*.bin")))
    for path in sorted(directory.glob("slot_*.manifest.json")):
        _read_slot(path, tags, found)
    for path in sorted(directory.glob("host_state/*/process_*_of_*.json")):
        document = load(path, "payload")
        if document is not None and not _read_host_state(document, tags, found) and not is_damaged:
            found.wrong.append(f"{path}: a host state that nobody saved")
    ledger = load(directory / "ledger.json", "ledger")
    known = None if ledger is None else ledger["ledger"]["complete"]
    if known is not None:
        found.known.add((known["incarnation"], known["step"]))
    if ledger is not None:
        _note_lives(ledger["ledger"], found)


def _note_lives(ledger: Any, found: Holdings) -> None:
    found.lives.add(ledger["incarnation"])
    if ledger["chain"] is not None:
        found.heads.add(ledger["chain"]["head"])
        found.lives.add(ledger["chain"]["head"])


def _read_host_state(document: Any, tags: Tags, found: Holdings) -> bool:
    """Count a host state; return whether it is one that was saved."""
    try:
        save = (document["save"]["incarnation"], document["save"]["step"])
        owner, count, payload = document["owner"], document["count"], document["payload"]
        saved = {"tag": tags.source(save), "step": save[1], "me": owner}
    except (KeyError, TypeError):
        return False
    if payload != saved:
        return False
    found.host_states.setdefault((save, count), Counter())[owner] += 1
    return True


def load(path: Path, inner: str) -> Any:
    """Return the document of a file with a digest of its value ``inner``; None when damaged."""
    try:
        raw = path.read_bytes()
        document: Any = json.loads(raw)
        start = raw.index(f'"{inner}":'.encode()) + len(inner) + 3
        end = raw.index(b',"save":', start) if inner == "payload" else raw.rindex(b"}")
        # From format 2 on, the digest is of the format's number too.
        number = 1 if inner == "payload" else document["format"]
        before = b"" if number == 1 else f"{number}\n".encode()
        digest = hashlib.sha256(before + raw[start:end]).hexdigest()
        if digest == document["digest"] and number in (1, 2):
            return document
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _read_slot(path: Path, tags: Tags, found: Holdings) -> None:
    manifest = load(path, "manifest")
    if manifest is None:
        return
    contents = manifest["manifest"]["contents"]
    save = (contents["save"]["incarnation"], contents["save"]["step"])
    tag = tags.find(save[0])
    slot = path.with_name(path.name.replace(".manifest.json", ".bin"))
    data = slot.read_bytes()
    if tag is None:
        found.wrong.append(f"{path}: a save {save} that nobody began")
        return
    found.lives.add(save[0])
    truth = devices.whole(tags.source(save), save[1])
    held = found.boxes.setdefault(
        save, {name: np.zeros(value.shape, np.int32) for name, value in truth.items()}
    )
    for shard in contents["shards"]:
        name = contents["leaves"][shard["leaf"]]["path"]
        box = tuple(slice(start, stop) for start, stop in shard["box"])
        part = data[shard["offset"] : shard["offset"] + shard["nbytes"]]
        if part == np.ascontiguousarray(truth[name][box]).tobytes():
            held[name][box] += 1
        elif _crc32c(part) == shard["crc32c"]:
            found.wrong.append(f"{path}: {name} {shard['box']} of {save}: wrong bytes, right CRC")
        else:
            found.torn.append(path)


def _crc32c(data: bytes) -> int:
    import google_crc32c  # noqa: PLC0415 - another implementation than the product's

    return google_crc32c.value(data)


def whole_saves(found: Holdings, with_host_states: bool = True) -> list[Save]:
    """Return the saves of which every element and every process's host state is held."""
    whole: list[Save] = []
    for save, leaves in found.boxes.items():
        if not all(held.size == 0 or held.min() > 0 for held in leaves.values()):
            continue
        owners = [
            (count, each) for (other, count), each in found.host_states.items() if other == save
        ]
        if not with_host_states or any(len(each) == count for count, each in owners):
            whole.append(save)
    return sorted(whole, key=lambda save: save[1])


def stored_saves(directory: Path, tags: Tags) -> list[Save]:
    """Return the saves in storage, in their own places, that are whole with the right bytes."""
    saves: list[Save] = []
    for path in sorted(directory.glob("host_state/*/marker.json")):
        document = load(path, "marker")
        if document is None:
            continue
        marker = document["marker"]
        save = (marker["save"]["incarnation"], marker["save"]["step"])
        if path.parent.name == str(save[1]) and _is_stored(
            directory, path.parent, save, tags, marker
        ):
            saves.append(save)
    return saves


def _is_stored(directory: Path, documents: Path, save: Save, tags: Tags, marker: Any) -> bool:
    truth = devices.whole(tags.source(save), save[1])
    missing = {name: np.ones(value.shape, bool) for name, value in truth.items()}
    folder = directory / str(save[1])
    if not (folder / storage.COMMITTED).exists():
        return False
    for leaf, box, values in arrays.boxes_of(folder / storage.ITEM):
        index = tuple(slice(first, last) for first, last in box)
        if values.tobytes() != np.ascontiguousarray(truth[leaf][index]).tobytes():
            return False
        missing[leaf][index] = False
    count = len(marker["digests"])
    names = [documents / f"process_{n:05}_of_{count:05}.json" for n in range(count)]
    return not any(each.any() for each in missing.values()) and all(map(Path.exists, names))


def logged_lives(directory: Path) -> set[str]:
    """Return the incarnations that the newest version of the log names: its own and the head."""
    version = _newest_version(directory)
    return set() if version is None else {version["incarnation"], *logged_heads(directory)}


def logged_heads(directory: Path) -> set[str]:
    """Return the incarnation whose chain the newest version of the log has; none without one."""
    version = _newest_version(directory)
    chain = None if version is None else version.get("chain")
    return set() if chain is None else {chain["head"]}


def _newest_version(directory: Path) -> dict[str, Any] | None:
    for path in sorted(directory.glob("host_state/log/*.json"), reverse=True):
        document = load(path, "version")
        if document is not None:
            return document["version"]
    return None


def newest_complete(
    found: Holdings,
    lives: Lives,
    stored: Iterable[Save] = (),
    heard: Iterable[Save] = (),
    logged: Iterable[str] = (),
) -> Save | None:
    """Return the newest save that every restore must find, or None.

    A save that any life ever rolled back does not count, even if its record is lost.

    Args:
      stored: the saves in storage.
      heard: saves in storage that does not surely answer: their lives may win over others.
      logged: incarnations in storage's log, which may win too.
    """
    stored = list(stored)
    reach = found.lives.union((incarnation for incarnation, _ in [*stored, *heard]), logged)
    counts = [save for save in [*whole_saves(found), *stored] if lives.counts(save, reach)]
    return max(counts, key=lambda save: save[1], default=None)


def copies(found: Holdings, save: Save) -> tuple[int, int]:
    """Return how often the rarest element, and the rarest host state, of a save is held."""
    elements = min(int(held.min()) for held in found.boxes[save].values() if held.size)
    sets = [each for (other, _), each in found.host_states.items() if other == save]
    return elements, max((min(each.values()) for each in sets), default=0)
