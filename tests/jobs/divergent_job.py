"""Restores from replicas that differ, in one job of four real processes of one host each.

A copy is altered as whoever holds its host could: other bytes in the slot, and a manifest whose
CRCs and digests fit them. Each program returns what its process saw; ``test_divergent.py`` judges.
"""

from __future__ import annotations

from typing import Any

import msgspec
from job_process import JobProcess, mesh_of, programs_of, run_program
from restoring import lose, newest_manifest, process_dir, restore, train

from emergency_ckpt import _native
from emergency_ckpt.extras.striped import Striped
from emergency_ckpt.ram.manifest import decode_manifest, encode_contents, wrap_contents

LEAF = "bytes"


def alter(world: JobProcess, name: str, *hosts: int) -> None:
    """Other bytes in one shard at each of ``hosts``, the same at all: of ``LEAF`` where it is."""
    world.meet()
    if world.process in hosts:
        path = newest_manifest(process_dir(world, name, world.process))
        manifest = decode_manifest(path.read_bytes())
        contents = manifest.contents
        filled = [n for n, entry in enumerate(contents.shards) if entry.nbytes]
        index = max(filled, key=lambda n: (contents.shard_id(n).leaf == LEAF, -n))
        entry = contents.shards[index]
        with path.with_name(f"{path.name.split('.')[0]}.bin").open("r+b") as file:
            file.seek(entry.offset)
            altered = bytes(byte ^ 1 for byte in file.read(entry.nbytes))
            file.seek(entry.offset)
            file.write(altered)
        shards = list(contents.shards)
        shards[index] = msgspec.structs.replace(entry, crc32c=_native.crc32c(altered))
        contents = msgspec.structs.replace(contents, shards=tuple(shards))
        path.write_bytes(wrap_contents(encode_contents(contents), manifest.writer))
    world.meet()


def seen(world: JobProcess, name: str, **settings: Any) -> dict[str, Any]:
    """What ``restore`` returns, and the events ``divergence`` of this process."""
    result = restore(world, name, **settings)
    return {**result, "divergence": [each["text"] for each in world.named("divergence")]}


def one_of_three(world: JobProcess) -> Any:
    """Slices 1 to 3 keep a copy; that of slice 2 is altered. Then the two others go."""
    train(world, "three", range(1, 11))
    alter(world, "three", 2)
    first = seen(world, "three")
    lose(world, "three", 1, 3)
    return [first, seen(world, "three")]


def one_of_three_striped(world: JobProcess) -> Any:
    settings = {"placement": Striped(3, 0)}
    train(world, "striped", range(1, 11), **settings)
    alter(world, "striped", 1)
    return seen(world, "striped", **settings)


def two_slices(world: JobProcess, name: str, **settings: Any) -> Any:
    """Two slices of two hosts, one copy in each: processes 0 and 2 hold the same."""
    train(world, name, range(1, 11), mesh=mesh_of(2))
    alter(world, name, 2)
    return seen(world, name, mesh=mesh_of(2), **settings)


def one_of_two(world: JobProcess) -> Any:
    """All restore the same one of them, and what is saved then has equal copies."""
    first = two_slices(world, "two")
    lose(world, "two", 0)
    return [first, seen(world, "two", mesh=mesh_of(2))]


if __name__ == "__main__":
    run_program(programs_of(globals()))
