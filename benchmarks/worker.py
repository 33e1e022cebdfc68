"""One process of the job: ``python worker.py ORDERS.json``. Started by ``lives.py``."""

import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

import contenders
import jax
import state as model
import traffic
from jax.experimental import multihost_utils
from job import FROM_STORAGE, Orders
from ramdisk import PeakWatch

from emergency_ckpt.launch.environment import JobEnvironment
from emergency_ckpt.runtime.job import initialize_job

PyTree = Any
STEPS_BETWEEN_SAVES = 3
STORAGE_SAVES = 2
"""The first one finds nothing warm; both are in the results."""


def main(orders: Orders) -> None:
    environment = JobEnvironment.from_environ()
    initialize_job(environment)
    contender = contenders.load(orders.contender)
    contender.prepare()
    life = environment.restart_count
    result: dict[str, Any]
    if life == 0:
        result = _save_life(contender, environment, orders)
    else:
        result = _restore_life(contender, environment, orders, orders.restores[life - 1])
    result["peak_rss_bytes"] = _peak_rss_bytes()
    orders.result_path(life, environment.process_index).write_text(json.dumps(result))
    multihost_utils.sync_global_devices("end of life")
    jax.distributed.shutdown()


def _peak_rss_bytes() -> int:
    # Linux gives kibibytes; pages of mapped ramdisk files count as well.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _site(environment: JobEnvironment, orders: Orders, tier: str, ramdisk: str) -> contenders.Site:
    """Each tier has directories of its own: the newest step must not be the other one's."""
    mesh = model.make_mesh(orders.shape)
    local_dir = environment.local_dir / ramdisk
    local_dir.mkdir(exist_ok=True)
    persistent_dir = Path(orders.persistent_dir) / tier
    persistent_dir.mkdir(exist_ok=True)
    return contenders.Site(
        mesh=mesh,
        replica_axis=model.REPLICA_AXIS,
        abstract_state=model.abstract_state(orders.shape, mesh),
        tier=tier,
        local_dir=local_dir,
        persistent_dir=persistent_dir,
        bind_host=orders.bind_host or socket.gethostbyname(socket.gethostname()),
    )


def _save_life(
    contender: contenders.Contender, environment: JobEnvironment, orders: Orders
) -> dict[str, Any]:
    """Saves to each tier, RAM first, with the state of a training that goes on."""
    state, step = None, 0
    result = {}
    for tier in orders.tiers:
        site = _site(environment, orders, tier, tier)
        if state is None:
            state = model.first_state(site.abstract_state)
        saves = _save_to_ram if tier == contenders.RAM else _save_to_storage
        result[tier], state, step = saves(contender.open_session(site), site, orders, state, step)
        result[tier]["peak_rss_bytes"] = _peak_rss_bytes()
    return result


def _save_to_ram(
    session: contenders.Session,
    site: contenders.Site,
    orders: Orders,
    state: PyTree,
    step: int,
) -> tuple[dict[str, Any], PyTree, int]:
    """One save to warm up, the timed ones, and one whose state is donated while it is on its way.

    The timed saves have the cores for themselves, as they have on an accelerator's host. The last
    one shares them with a training step, and is the one that the next lives must find intact.
    """
    session.start_fresh()
    saves = []
    for _ in range(1 + orders.shape.timed_saves):
        state, step = _train(state, step)
        saves.append(_timed_save(session, step, state))
    state, step = _train(state, step)
    expected = model.digests(state)
    with PeakWatch(site.local_dir) as peak:
        donated, state = _donating_save(session, step, state)
    multihost_utils.sync_global_devices("all saved")
    session.close()
    result = {
        "warm_up": saves[0],
        "saves": saves[1:],
        "donated": donated,
        "step": step,
        "digests": expected,
        "peak_ramdisk_bytes": peak.size_bytes,
    }
    return result, state, step + 1


def _save_to_storage(
    session: contenders.Session,
    site: contenders.Site,
    orders: Orders,
    state: PyTree,
    step: int,
) -> tuple[dict[str, Any], PyTree, int]:
    session.start_fresh()
    saves = []
    for _ in range(STORAGE_SAVES):
        # What others have left to be written to the disk must not slow this save down.
        os.sync()
        state, step = _train(state, step)
        saves.append(_timed_save(session, step, state))
    result = {"saves": saves, "step": step, "digests": model.digests(state)}
    session.close()
    return result, state, step


def _train(state: PyTree, step: int) -> tuple[PyTree, int]:
    for _ in range(STEPS_BETWEEN_SAVES):
        state = model.train_step(state)
    jax.block_until_ready(state)
    # The slowest process's last step must not count as the others' stall.
    multihost_utils.sync_global_devices(f"step {step}")
    return state, step + STEPS_BETWEEN_SAVES


def _timed_save(session: contenders.Session, step: int, state: PyTree) -> dict[str, Any]:
    before = traffic.counters()
    cpu_s = time.process_time()
    start = time.monotonic()
    session.save(step, state)
    returned = time.monotonic()
    session.wait()
    published = time.monotonic()
    cpu_s = time.process_time() - cpu_s
    after = traffic.counters()
    # A process that has nothing to wait for must not train while another still publishes.
    multihost_utils.sync_global_devices(f"published {step}")
    return {
        "start_s": start,
        "returned_s": returned,
        "published_s": published,
        "cpu_s": cpu_s,
        "traffic_before": before,
        "traffic_after": after,
    }


def _donating_save(
    session: contenders.Session, step: int, state: PyTree
) -> tuple[dict[str, float], PyTree]:
    start = time.monotonic()
    session.save(step, state)
    returned = time.monotonic()
    state = jax.block_until_ready(model.train_step(state))
    session.wait()
    return {"start_s": start, "returned_s": returned, "published_s": time.monotonic()}, state


def _restore_life(
    contender: contenders.Contender, environment: JobEnvironment, orders: Orders, scenario: str
) -> dict[str, Any]:
    """From building the checkpointer to values on devices, timed; then the check of each shard."""
    if scenario == FROM_STORAGE:
        site = _site(environment, orders, contenders.STORAGE, "empty")
    else:
        site = _site(environment, orders, contenders.RAM, contenders.RAM)
    expected = json.loads(Path(orders.expected_path).read_text())[site.tier]
    read_all = model.read_all.lower(site.abstract_state).compile()
    # Also sets up JAX's own collectives, which are part of its start and not of a restore.
    multihost_utils.sync_global_devices("before restore")
    before = traffic.counters()
    cpu_s = time.process_time()
    start = time.monotonic()
    session = contender.open_session(site)
    opened = time.monotonic()
    try:
        state = jax.block_until_ready(session.restore(expected["step"]))
    except contenders.CannotRestore as refusal:
        session.close()
        return {"refused": str(refusal)}
    restored = time.monotonic()
    cpu_s = time.process_time() - cpu_s
    after = traffic.counters()
    # Restored values may lie in memory that nobody has touched yet.
    jax.block_until_ready(read_all(state))
    read = time.monotonic()
    found = model.digests(state)
    wrong = {k: d for k, d in found.items() if expected["digests"].get(k) != d}
    if wrong:
        raise RuntimeError(f"{len(wrong)} restored shards differ: {wrong}")
    multihost_utils.sync_global_devices("all verified")
    session.close()
    return {
        "start_s": start,
        "opened_s": opened,
        "restored_s": restored,
        "read_s": read,
        "cpu_s": cpu_s,
        "traffic_before": before,
        "traffic_after": after,
        "verified_shards": sorted(found),
        "verified_bytes": sum(s.data.nbytes for a in state.values() for s in a.addressable_shards),
    }


if __name__ == "__main__":
    main(Orders.read(Path(sys.argv[1])))
