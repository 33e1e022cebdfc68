"""One process of two, each on a host of its own: saves to RAM, loses process 0's RAM, restores.

Arguments: root, process, the coordinator's address as this host's resolver gives it, bind_host or
an empty text. Prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
from configs import config_with
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from memory_coordination import meet

from emergency_ckpt.cluster.coordination import connect
from emergency_ckpt.errors import CheckpointError

_MEETING_TIMEOUT_S = 60.0


def main() -> dict[str, object]:
    root, process, coordinator, bind_host = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    port = coordinator.rpartition(":")[2]
    os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = f"0.0.0.0:{port}"
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(coordinator, 2, process)
    meeting = connect("meeting")
    mesh = Mesh(np.array(jax.devices()), ("slice",))

    def state(step: int) -> dict[str, jax.Array]:
        whole = np.full((4,), step, np.float32)
        sharding = NamedSharding(mesh, P())
        return {"w": jax.make_array_from_callback((4,), sharding, lambda index: whole[index])}

    settings = {
        "run_id": "loopback",
        "local_dir": str(root / f"ram_{process}"),
        "mesh": mesh,
        "replica_axis": "slice",
        "local_save_every": 1,
        "save_timeout_s": 20,
        "transfer_timeout_s": 5,
        "bind_host": bind_host or None,
    }
    config = config_with(settings)
    try:
        with config.instantiate() as ckpt:
            ckpt.save(step=1, state=state(1), host_state={"at": process})
            ckpt.wait_until_finished()
            failed = ckpt.failed_saves
        meet(meeting, "saved", _MEETING_TIMEOUT_S)
        if process == 0:
            shutil.rmtree(root / "ram_0")
        meet(meeting, "lost", _MEETING_TIMEOUT_S)
        with config.instantiate() as ckpt:
            step, _ = ckpt.restore(state=state(0), host_state={"at": -1})
        return {"failed": failed, "restored": step}
    except CheckpointError as error:
        return {"error": type(error).__name__, "text": str(error)}
    finally:
        meet(meeting, "end", _MEETING_TIMEOUT_S)


if __name__ == "__main__":
    print(json.dumps(main()))
