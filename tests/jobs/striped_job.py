"""Fewer copies than slices: saves and restores on fresh ramdisks, in one job of four processes.

Each program returns what its process saw; ``test_striped.py`` judges. Unless said, four slices of
one host; leaves of any size are striped.
"""

from __future__ import annotations

import json
from typing import Any

from job_process import (
    Iterator,
    JobProcess,
    differences,
    finish,
    mesh_of,
    programs_of,
    run_program,
    specs_on,
    state_at,
)
from restoring import damage_newest, lose, process_dir, restore, train

from emergency_ckpt.extras.striped import Striped


def two_copies(**settings: Any) -> dict[str, Any]:
    return {"placement": Striped(2, 0), **settings}


def stored(world: JobProcess, name: str) -> list[list[Any]]:
    """Leaf, box and bytes of all that this process has published of the newest step."""
    found: dict[int, set[tuple[str, str, int]]] = {}
    for path in process_dir(world, name, world.process).glob("slot_*.manifest.json"):
        contents = json.loads(path.read_bytes())["manifest"]["contents"]
        paths = [leaf["path"] for leaf in contents["leaves"]]
        shards = found.setdefault(contents["save"]["step"], set())
        shards |= {(paths[s["leaf"]], str(s["box"]), s["nbytes"]) for s in contents["shards"]}
    return [list(shard) for shard in sorted(found[max(found)])]


def nothing_lost(world: JobProcess) -> Any:
    train(world, "intact", range(1, 11), **two_copies())
    before = stored(world, "intact")
    seen = restore(world, "intact", **two_copies())
    return {**seen, "stored": before, "then": stored(world, "intact")}


def host_lost(world: JobProcess) -> Any:
    """A lost host stores again what it stored before: now its partner may go."""
    train(world, "host", range(1, 11), **two_copies())
    before = stored(world, "host")
    lose(world, "host", 1)
    first = restore(world, "host", **two_copies())
    again = stored(world, "host") == before
    lose(world, "host", 0)
    return [first, restore(world, "host", **two_copies()), again]


def a_group_lost(world: JobProcess) -> Any:
    train(world, "group", range(1, 11), **two_copies())
    lose(world, "group", 2, 3)
    return restore(world, "group", **two_copies())


def persistent_after_a_group_lost(world: JobProcess) -> Any:
    """Storage gives back what RAM lost; then every host is a holder of its part again."""
    settings = two_copies(dir=str(world.root / "persistent"), save_every=5)
    train(world, "deep", range(1, 8), **settings)
    before = stored(world, "deep")
    lose(world, "deep", 0, 1)
    first = restore(world, "deep", **settings)
    # One without bytes needs no holder.
    again = {tuple(shard) for shard in before if shard[2]} <= set(map(tuple, stored(world, "deep")))
    lose(world, "deep", 0, 2)
    return [first, restore(world, "deep", **two_copies()), again]


def three_copies_of_four(world: JobProcess) -> Any:
    """The number of slices is no multiple of the copies: any two hosts may go."""
    settings = {"placement": Striped(3, 0)}
    train(world, "three", range(1, 11), **settings)
    before = stored(world, "three")
    lose(world, "three", 1, 2)
    return {**restore(world, "three", **settings), "stored": before}


def one_copy_of_two_slices(world: JobProcess) -> Any:
    """Two slices of two hosts, where some leaves are replicated inside a slice."""
    settings = {"placement": Striped(1, 0), "mesh": mesh_of(2)}
    train(world, "one", range(1, 11), **settings)
    before = stored(world, "one")
    return {**restore(world, "one", **settings), "stored": before}


def slices_swapped(world: JobProcess) -> Any:
    """What was one group is two now: each host stores what its new place asks for."""
    train(world, "swapped", range(1, 11), **two_copies())
    mesh = mesh_of(4, [0, 2, 1, 3])
    first = restore(world, "swapped", **two_copies(mesh=mesh))
    # The groups are hosts {0, 2} and {1, 3} now; one of each may go.
    lose(world, "swapped", 0, 1)
    return [first, restore(world, "swapped", **two_copies(mesh=mesh))]


def other_mesh(world: JobProcess) -> Any:
    """Saved by four slices, restored by two slices of two hosts, of whom one is lost then."""
    train(world, "mesh", range(1, 11), **two_copies())
    first = restore(world, "mesh", **two_copies(mesh=mesh_of(2)))
    lose(world, "mesh", 2)
    return [first, restore(world, "mesh", **two_copies(mesh=mesh_of(2)))]


def other_copies(world: JobProcess) -> Any:
    """Saved with all copies, restored with two: nothing is thrown away, nothing moves."""
    train(world, "policy", range(1, 11), placement="striped(4)")
    return restore(world, "policy", **two_copies())


def partners_did_not_save(world: JobProcess) -> Any:
    """Step 10 was published by one group only: it is not complete, and 5 was never touched."""
    mesh = mesh_of(world.slices)
    iterator = Iterator(world.process)
    with world.config("half", save_timeout_s=2.0, **two_copies()).instantiate() as ckpt:
        ckpt.restore(state=specs_on(mesh), host_state=iterator)
        for step in (5, 10) if world.process < 2 else (5,):
            ckpt.save(step=step, state=state_at(step, mesh), host_state=iterator.at(step))
            ckpt.wait_until_finished()
            if step == 5:
                world.meet()
        world.meet()
    return restore(world, "half", **two_copies())


def damaged_copy(world: JobProcess) -> Any:
    """A shard is damaged at one of its two holders."""
    train(world, "damage", range(1, 11), **two_copies())
    world.meet()
    if world.process == 3:
        damage_newest(process_dir(world, "damage", 3))
    world.meet()
    return restore(world, "damage", **two_copies())


def restored_state_outlives_saves(world: JobProcess) -> Any:
    """What was fetched is neither overwritten nor given back while its arrays live."""
    mesh = mesh_of(world.slices)
    iterator = Iterator(world.process)
    train(world, "alive", range(1, 11), **two_copies())
    with world.config("alive", **two_copies()).instantiate() as ckpt:
        _, state = ckpt.restore(state=specs_on(mesh), host_state=iterator)
        for step in range(11, 31):
            ckpt.save(step=step, state=state_at(step, mesh), host_state=iterator.at(step))
        finish(ckpt)
        wrong = differences(state, 10, mesh)
        second, again = ckpt.restore(state=specs_on(mesh), host_state=iterator)
        world.meet()
    return {"step": second, "differences": wrong + differences(again, 30, mesh)}


if __name__ == "__main__":
    run_program(programs_of(globals()))
