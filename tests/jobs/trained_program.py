"""Train beside evaluators: save the steps that the standard input names, to RAM at least."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
from every_face import opener
from orbax_faces import state
from world import World

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def main(root: str, kind: str) -> None:
    world = World(Path(root))
    face = opener(kind, world)()
    print(face.latest(), flush=True)
    for line in sys.stdin:
        step, *where = line.split()
        face.save(int(step), state(world, int(step)), force=bool(where))
        face.wait()
        print("saved", flush=True)
    face.close()


main(*sys.argv[1:])
