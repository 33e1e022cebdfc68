"""Lives that end by SIGKILL in a save to both tiers, each in the directories of the one before.

The main thread, which is the only one, forks the lives: each begins in a fraction of a second.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a fork takes the calling thread only

import jax
import numpy as np

from emergency_ckpt import EmergencyCheckpointer
from emergency_ckpt.events import Event

for _name in (
    "orbax.checkpoint",
    *(f"emergency_ckpt.storage.{name}" for name in ("orbax_reader", "step_writer")),
):
    importlib.import_module(_name)

WAIT_S = 60.0
PERSISTENT_EVERY = 4
"""Steps between those that are due in storage too; RAM gets the others while storage has a slot."""


def state_of(step: int, life: int) -> dict[str, Any]:
    value = 1000 * life + step
    return {name: np.full((64, 64), value, np.float32) for name in ("a", "b", "c")}


def values_of(state: dict[str, Any]) -> list[int]:
    return sorted({int(v) for leaf in state.values() for v in np.unique(np.asarray(leaf))})


class Killer:
    """Kills this process at an event of the save of one step, when RAM is far enough ahead."""

    def __init__(self, point: str, ahead: int) -> None:
        self._point, self._ahead = point, ahead
        self._is_ahead = threading.Event()
        self.step = -1

    def __call__(self, event: Event) -> None:
        step = event.fields.get("step")
        if (event.name, step) == ("save.complete", self.step + self._ahead):
            self._is_ahead.set()
        if (event.point, step) == (self._point, self.step):
            self.kill()

    def kill(self) -> None:
        if self._ahead:
            assert self._is_ahead.wait(WAIT_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_in_commit(self) -> None:
        """Kill this process when TensorStore was told to commit the arrays of the step."""
        from emergency_ckpt.storage.array_writes import ArrayWrites  # noqa: PLC0415

        begin, result, begun = ArrayWrites._begin, ArrayWrites.result, []

        def begin_and_note(*args: Any) -> None:
            begin(*args)
            begun.append(True)

        def result_or_die(own: ArrayWrites, future: Any) -> Any:
            if begun and self.step > 0:  # the first one after the batch was handed over
                self.kill()
            begun.clear()
            return result(own, future)

        ArrayWrites._begin, ArrayWrites.result = begin_and_note, result_or_die


def open_run(root: Path, ram: str, **settings: Any) -> EmergencyCheckpointer:
    return EmergencyCheckpointer(
        dir=str(root / "persistent"),
        local_dir=str(root / ram),
        run_id="run",
        local_save_every=1,
        **{"save_every": PERSISTENT_EVERY, **settings},
    )


def restored(ckpt: EmergencyCheckpointer) -> dict[str, Any]:
    position = {"at": -1}
    step, state = ckpt.restore(state=state_of(0, 0), host_state=position)
    return {"step": step, "values": values_of(state), "position": position["at"]}


def live(root: Path, life: int, point: str, ahead: int, tell: Callable[[Any], None]) -> None:
    """Restore, save on, and die in the save of the second step that is due in both tiers."""
    killer = Killer(point, ahead)
    if point == "commit":
        killer.kill_in_commit()
    with open_run(root, "ram", on_event=killer) as ckpt:
        seen = restored(ckpt)
        tell(seen)
        first = (seen["step"] or 0) + 1
        whole = -(-first // PERSISTENT_EVERY) * PERSISTENT_EVERY
        victim = whole + PERSISTENT_EVERY
        for step in range(first, victim + PERSISTENT_EVERY):
            if step == victim:
                ckpt.wait_until_finished()
                ckpt.check_for_errors()
                killer.step = victim
            ckpt.save(step=step, state=state_of(step, life), host_state={"at": step})
        threading.Event().wait(WAIT_S)


def look(root: Path, tell: Callable[[Any], None]) -> None:
    """Restore what storage has; write nothing there."""
    shutil.rmtree(root / "other ram", ignore_errors=True)
    with open_run(root, "other ram", save_every=0) as ckpt:
        tell(restored(ckpt))


def in_fork(work: Callable[[Callable[[Any], None]], None]) -> tuple[Any, int]:
    """Do ``work`` in a fork of this process; return what it told, and its exit status."""
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.close(told)
            jax.config.update("jax_platforms", "cpu")
            work(lambda value: os.write(tells, json.dumps(value).encode()) and None)
            status = 0
        except BaseException:  # noqa: BLE001 - the process ends here
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(tells)
    with open(told, "rb") as file:
        data = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(data or b"null"), status


def main(root: Path, points: list[list[Any]]) -> None:
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads before the first fork"
    seen: list[dict[str, Any]] = []
    for life, (point, ahead) in enumerate(points, 1):
        begun, status = in_fork(lambda tell: live(root, life, point, ahead, tell))  # noqa: B023
        stored, looked = in_fork(lambda tell: look(root, tell))
        seen.append({"begun": begun, "status": status, "stored": stored, "looked": looked})
    seen.append({"begun": in_fork(lambda tell: finish(root, tell))[0]})
    print(json.dumps(seen))


def finish(root: Path, tell: Callable[[Any], None]) -> None:
    with open_run(root, "ram") as ckpt:
        tell(restored(ckpt))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
