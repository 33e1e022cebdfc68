"""What somebody can write who knows the formats."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any


def canonical(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def resealed(file: dict[str, Any]) -> dict[str, Any]:
    """A manifest with its digests computed anew."""
    body = file["manifest"]
    body["contents_digest"] = hashlib.sha256(canonical(body["contents"])).hexdigest()
    file["digest"] = hashlib.sha256(canonical(body)).hexdigest()
    return file


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())


def write(path: Path, file: object) -> None:
    """As the owner of the directory would: a planted file is his."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(canonical(file))


def make_up_step(directory: Path, step: int) -> None:
    """In a process directory: a whole save of ``step``, sound in itself, from the newest there."""
    manifests = {step_of(path): path for path in directory.glob("slot_?.manifest.json")}
    newest = max(manifests)
    file = read(manifests[newest])
    file["manifest"]["contents"]["save"]["step"] = step
    number = max(int(path.name[5]) for path in directory.glob("slot_?.bin")) + 1
    made_up = directory / f"slot_{number}.manifest.json"
    write(made_up, resealed(file))
    shutil.copy(_slot(manifests[newest]), _slot(made_up))
    _slot(made_up).chmod(0o600)
    for state in directory.glob(f"host_state/*-{newest}/*.json"):
        document = read(state)
        document["save"]["step"] = step
        name = f"{document['save']['incarnation']}-{step}"
        write(directory / "host_state" / name / state.name, document)
        ledger = {"incarnation": "", "chain": None, "complete": document["save"]}
        digest = hashlib.sha256(canonical(ledger)).hexdigest()
        write(directory / "ledger.json", {"format": 1, "digest": digest, "ledger": ledger})


def step_of(manifest: Path) -> int:
    return read(manifest)["manifest"]["contents"]["save"]["step"]


def _slot(manifest: Path) -> Path:
    return manifest.with_name(manifest.name.replace("manifest.json", "bin"))


def write_sealed(path: Path, kind: str, value: object, **fields: object) -> None:
    """A marker or a version of the step log, of which every plain digest is right.

    ``fields``: of the file besides; ``format`` of another version of this package.
    """
    encoded = json.dumps(value, separators=(",", ":"))
    number = fields.pop("format", 2 if kind == "version" else 1)
    covered = encoded if number == 1 else f"{number}\n{encoded}"
    digest = hashlib.sha256(covered.encode()).hexdigest()
    head = json.dumps({"format": number, "digest": digest, **fields}, separators=(",", ":"))
    path.write_text(f'{head[:-1]},"{kind}":{encoded}}}')
