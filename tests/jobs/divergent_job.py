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
        manifest, _ = decode_manifest(path.read_bytes())
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
    """Slices 1 to 3 keep a copy; that of slice 2 is altered. Then the two that were right go."""
    train(world, "three", range(1, 11))
    alter(world, "three", 2)
    first = seen(world, "three", on_divergence="stop")
    lose(world, "three", 1, 3)
    return [first, seen(world, "three")]


def one_of_three_striped(world: JobProcess) -> Any:
    settings = {"placement": Striped(3, 0)}
    train(world, "striped", range(1, 11), **settings)
    alter(world, "striped", 1)
    return seen(world, "striped", **settings)


def majority_is_lost(world: JobProcess) -> Any:
    """What outvoted the altered copy is damaged: the older step is taken, not the altered one."""
    train(world, "rotten", range(1, 11))
    alter(world, "rotten", 2)
    if world.process in (1, 3):
        path = newest_manifest(process_dir(world, "rotten", world.process))
        manifest, _ = decode_manifest(path.read_bytes())
        entry = next(
            each
            for index, each in enumerate(manifest.contents.shards)
            if manifest.contents.shard_id(index).leaf == LEAF
        )
        with path.with_name(f"{path.name.split('.')[0]}.bin").open("r+b") as file:
            file.seek(entry.offset)
            file.write(b"\xff" * entry.nbytes)
    world.meet()
    return seen(world, "rotten")


def two_slices(world: JobProcess, name: str, **settings: Any) -> Any:
    """Two slices of two hosts, one copy in each: processes 0 and 2 hold the same."""
    train(world, name, range(1, 11), mesh=mesh_of(2))
    alter(world, name, 2)
    return seen(world, name, mesh=mesh_of(2), **settings)


def tie_warns(world: JobProcess) -> Any:
    return two_slices(world, "warn")


def tie_stops(world: JobProcess) -> Any:
    """All stop; an older step is there, and is restored only when it is asked for."""
    first = two_slices(world, "stop", on_divergence="stop")
    older = seen(world, "stop", mesh=mesh_of(2), on_divergence="stop", requested=5)
    return [first, older]


def tie_is_settled_by_storage(world: JobProcess) -> Any:
    """The same save lies in storage, whose checksums agree with one side."""
    settings = {"dir": str(world.root / "persistent"), "save_every": 10}
    train(world, "witness", range(1, 11), mesh=mesh_of(2), **settings)
    alter(world, "witness", 0)
    return seen(world, "witness", mesh=mesh_of(2), on_divergence="stop", **settings)


if __name__ == "__main__":
    run_program(programs_of(globals()))
