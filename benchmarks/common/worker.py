"""One process of the job: ``python worker.py ORDERS.json``. Started by ``lives.py``."""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from benchmarks.common import contenders, traffic
from benchmarks.common import state as model
from benchmarks.common.job import Orders
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

PyTree = Any
STORAGE_SAVES = 2
"""Number of saves to storage. The first one is a warm-up; the results have both."""
STEPS_AHEAD = 4
"""Steps in the devices' queue when a state is saved that is being computed."""


def main(orders: Orders) -> None:
    environment = JobEnvironment.from_environ()
    initialize_job(environment)
    contender = contenders.load(orders.contender)
    contender.prepare()
    life = environment.restart_count
    site = _site(environment, orders)
    result = _save_life(contender, site, orders) if life == 0 else _restore(contender, site, orders)
    orders.result_path(life, environment.process_index).write_text(json.dumps(result))
    multihost_utils.sync_global_devices("end of life")
    jax.distributed.shutdown()


def _site(environment: JobEnvironment, orders: Orders) -> contenders.Site:
    mesh = model.make_mesh(orders.shape)
    return contenders.Site(
        mesh=mesh,
        replica_axis=model.REPLICA_AXIS,
        abstract_state=model.abstract_state(orders.shape, mesh),
        tier=orders.tier,
        local_dir=environment.local_dir,
        persistent_dir=Path(orders.persistent_dir),
        bind_host=orders.bind_host or socket.gethostbyname(socket.gethostname()),
    )


def _save_life(
    contender: contenders.Contender, site: contenders.Site, orders: Orders
) -> dict[str, Any]:
    """Save the state of a running training."""
    state = model.first_state(site.abstract_state)
    session = contender.open_session(site)
    session.start_fresh()
    if site.tier == contenders.RAM:
        result = _save_to_ram(session, orders, state)
    else:
        result = _save_to_storage(session, state)
    session.close()
    return result


def _save_to_ram(session: contenders.Session, orders: Orders, state: PyTree) -> dict[str, Any]:
    """Do one warm-up save, the timed saves, and as many saves of a state that is being computed.

    The timed saves do not share the cores with training, as on an accelerator's host.
    """
    saves, computed, step = [], [], 0
    for _ in range(1 + orders.shape.timed_saves):
        state, step = _train(state, step)
        saves.append(_timed_save(session, step, state))
    for _ in range(orders.shape.timed_saves):
        for _ in range(STEPS_AHEAD):
            state = model.train_step(state)
        step += STEPS_AHEAD
        computed.append(_timed_save(session, step, state))
    return {
        "warm_up": saves[0],
        "saves": saves[1:],
        "computed": computed,
        "step": step,
        "digests": model.digests(state),
    }


def _save_to_storage(session: contenders.Session, state: PyTree) -> dict[str, Any]:
    saves, step = [], 0
    for _ in range(STORAGE_SAVES):
        # What others have left to be written to the disk must not slow this save down.
        os.sync()
        state, step = _train(state, step)
        saves.append(_timed_save(session, step, state))
    return {"saves": saves, "step": step, "digests": model.digests(state)}


def _train(state: PyTree, step: int) -> tuple[PyTree, int]:
    state = jax.block_until_ready(model.train_step(state))
    # The slowest process's last step must not count as the others' stall.
    multihost_utils.sync_global_devices(f"step {step}")
    return state, step + 1


def _timed_save(session: contenders.Session, step: int, state: PyTree) -> dict[str, Any]:
    start = time.monotonic()
    session.save(step, state)
    returned = time.monotonic()
    session.wait()
    published = time.monotonic()
    # A process that has nothing to wait for must not train while another still publishes.
    multihost_utils.sync_global_devices(f"published {step}")
    return {
        "start_s": start,
        "returned_s": returned,
        "ready_s": getattr(session, "ready_s", None),
        "published_s": published,
    }


def _restore(
    contender: contenders.Contender, site: contenders.Site, orders: Orders
) -> dict[str, Any]:
    """Time a restore, from building the checkpointer to values on devices; check each shard."""
    expected = json.loads(orders.expected_path.read_text())
    # Also sets up JAX's own collectives, which are part of its start and not of a restore.
    multihost_utils.sync_global_devices("before restore")
    before = traffic.over_links()
    start = time.monotonic()
    session = contender.open_session(site)
    try:
        state = jax.block_until_ready(contenders.restore(session, expected["step"]))
    except contenders.CannotRestore as refusal:
        session.close()
        return {"refused": str(refusal)}
    restored = time.monotonic()
    after = traffic.over_links()
    found = model.digests(state)
    wrong = {k: d for k, d in found.items() if expected["digests"].get(k) != d}
    if wrong:
        raise RuntimeError(f"{len(wrong)} restored shards differ: {wrong}")
    multihost_utils.sync_global_devices("all verified")
    session.close()
    return {
        "start_s": start,
        "restored_s": restored,
        "over_links": [b - a for a, b in zip(before, after, strict=True)],
        "verified_shards": sorted(found),
        "verified_bytes": sum(s.data.nbytes for a in state.values() for s in a.addressable_shards),
    }


if __name__ == "__main__":
    main(Orders.read(Path(sys.argv[1])))
