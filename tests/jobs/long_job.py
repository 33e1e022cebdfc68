"""One long life of two real processes: what grows with the number of its saves and restores."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed
from job_process import Iterator, JobProcess, mesh_of, programs_of, run_program, specs_on, state_at
from trees import files_below

SAVES = int(os.environ.get("ECKPT_TEST_SAVES", "2000"))
RESTORES = int(os.environ.get("ECKPT_TEST_RESTORES", "50"))


_LIBC = ctypes.CDLL(None)
_LIBC.open_memstream.restype = ctypes.c_void_p


def malloc_bytes() -> tuple[int, int]:
    """Return what ``malloc`` has given out, and what its arenas keep for later; malloc_info(3)."""
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(_LIBC.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    _LIBC.malloc_info(0, stream)
    _LIBC.fclose(stream)
    assert text.value is not None
    *_, total = text.value.decode().split("</heap>")
    _LIBC.free(text)
    found = {kind: int(size) for kind, size in _SIZE.findall(total)}
    kept = found["fast"] + found["rest"]
    return found["current"] + found["mmap"] - kept, kept


_SIZE = re.compile(r'<(?:total|system) type="(\w+)"[^>]* size="(\d+)"')


def measured(world: JobProcess, mesh: Any, directory: Path) -> dict[str, int]:
    """Return what this process and the job hold now, when nothing is under way."""
    gc.collect()
    _LIBC.malloc_trim(0)
    allocated_bytes, kept_bytes = malloc_bytes()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, used = files_below(world.ramdisk("long"))
    stored, _ = files_below(directory)
    client = distributed.global_state.client
    assert client is not None
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE") - kept_bytes,
        "allocated_bytes": allocated_bytes,
        "objects": len(gc.get_objects()),
        "ramdisk_files": files,
        "ramdisk_bytes": used,
        "stored_files": stored,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        # Without those of ``world.meet``, which stay.
        "keys": sum("/meet/" not in key for key, _ in client.key_value_dir_get_bytes("eckpt")),
        "arrays": len(jax.live_arrays()),
    }


def long_life(world: JobProcess) -> dict[str, list[dict[str, int]]]:
    """Save to both tiers SAVES times, then restore in place RESTORES times; measure in between."""
    mesh, directory = mesh_of(world.slices), world.root / "long_persistent"
    settings = {
        "dir": str(directory),
        "local_save_every": 1,
        "save_every": 1,
        "keep_last_n": 2,
        "save_timeout_s": 60.0,
    }
    saving: list[dict[str, int]] = []
    restoring: list[dict[str, int]] = []
    states = [state_at(step, mesh) for step in (1, 2)]
    iterator = Iterator(world.process)
    with world.config("long", mesh=mesh, **settings).instantiate() as ckpt:
        ckpt.restore(state=specs_on(mesh), host_state=iterator)
        for step in range(1, SAVES + 1):
            ckpt.save(step=step, state=states[step % 2], host_state=iterator.at(step))
            ckpt.wait_until_finished()
            ckpt.check_for_errors()
            if step == 10 or step % max(1, SAVES // 20) == 0:
                world.meet()
                world.events.clear()
                saving.append(measured(world, mesh, directory))
                world.meet()
        states.clear()
        for number in range(1, RESTORES + 1):
            step, state = ckpt.restore(state=specs_on(mesh), host_state=iterator)
            assert (step, iterator.is_at(SAVES, world.process)) == (SAVES, True)
            del state
            if number % 5 == 0:
                world.meet()
                world.events.clear()
                restoring.append(measured(world, mesh, directory))
                world.meet()
    return {"saving": saving, "restoring": restoring}


PROGRAMS = programs_of(globals())

if __name__ == "__main__":
    run_program(PROGRAMS)
