"""Host memory of persistent saves: used again, never while it is read, and bounded."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from world import World

from emergency_ckpt._native import Mapping, copy_crc32c, crc32c
from emergency_ckpt.core.save.snapshot_plan import Buffers
from emergency_ckpt.errors import SaveFailed
from emergency_ckpt.save.persistent.capture import ScratchArea
from emergency_ckpt.state.mapped import Pin

SIZE = 3 * 4096


def fill(borrowed: tuple[Mapping, Pin], value: int) -> np.ndarray:
    (mapping, pin), data = borrowed, np.full(SIZE, value, np.uint8)
    assert copy_crc32c(mapping, [(data, 0)], 1) == [crc32c(data)]
    return pin.view(0, SIZE)


def address(view: np.ndarray) -> int:
    return view.__array_interface__["data"][0]


def test_area_is_used_again_when_its_pin_has_ended() -> None:
    area = ScratchArea()
    borrowed = area.borrow(SIZE)
    first = fill(borrowed, 1)
    borrowed[1].end()  # though a view of it is alive
    second = fill(area.borrow(SIZE), 2)
    assert address(first) == address(second)


@pytest.mark.dear
def test_area_that_is_read_is_not_written_and_a_third_is_refused() -> None:
    area = ScratchArea()
    views = [fill(area.borrow(SIZE), value) for value in (1, 2)]
    with pytest.raises(SaveFailed, match="storage still reads the memory of earlier saves"):
        area.borrow(SIZE)
    assert [view[0] for view in views] == [1, 2]
    cycle: list[Any] = [views.pop()]
    cycle.append(cycle)
    del cycle  # as an error of a client of storage may keep it
    assert fill(area.borrow(SIZE), 3)[-1] == 3
    assert views[0][-1] == 1


def test_area_grows_for_a_larger_state() -> None:
    area = ScratchArea()
    area.borrow(SIZE)[1].end()
    borrowed = area.borrow(10 * SIZE)
    assert borrowed[1].view(9 * SIZE, SIZE).nbytes == SIZE
    assert borrowed[1].view(0, 0).nbytes == 0
    area.release()
    gc.collect()
    assert fill(borrowed, 4)[0] == 4


STATE_BYTES = 32 << 20
SAVES = 80


def peak_bytes() -> int:
    """Return the peak of this process's memory since the call before, and begin anew."""
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(peak.split()[1]) << 10


@pytest.mark.slow
@pytest.mark.parametrize("local_every", [0, 2], ids=["scratch", "slot"])
def test_peak_memory_of_persistent_saves_is_flat(world: World, local_every: int) -> None:
    sharding = NamedSharding(world.mesh, P("fsdp"))
    whole = np.zeros((8, STATE_BYTES // 32), np.float32)
    state = {"w": jax.device_put(whole, sharding)}
    step = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
    settings = {"device_reads": "pinned_host", "keep_last_n": 1, "local_save_every": local_every}
    pinned = Buffers(STATE_BYTES // 4)
    peaks: list[int] = []
    with world.open_both(buffers=pinned, **settings) as checkpointer:
        for number in range(2, 2 * SAVES + 1, 2):
            state = step(state)
            assert checkpointer.save(step=number, state=state)
            checkpointer.wait_until_finished()
            peaks.append(peak_bytes())
        checkpointer.check_for_errors()
    sources = {e.fields["source"] for e in world.events if e.point == "persistent.stage.captured"}
    assert sources == {"slot" if local_every else "scratch"}
    # In the first dozen the arenas of the threads that take turns come to their size.
    early, late = max(peaks[SAVES // 4 : SAVES // 2]), max(peaks[SAVES // 2 :])
    assert late <= 1.05 * early, peaks
