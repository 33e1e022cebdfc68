"""One process of the job: ``python worker.py ORDERS.json``. Started by ``lives.py``."""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import contenders
import jax
import state as model
from jax.experimental import multihost_utils
from job import Orders, Shape
from ramdisk import PeakWatch

from emergency_ckpt.launch.environment import JobEnvironment
from emergency_ckpt.runtime.job import initialize_job

PyTree = Any
STEPS_BETWEEN_SAVES = 3


def main(orders: Orders) -> None:
    environment = JobEnvironment.from_environ()
    initialize_job(environment)
    contender = contenders.load(orders.contender)
    contender.prepare()
    mesh = model.make_mesh(orders.shape)
    site = contenders.Site(
        mesh=mesh,
        replica_axis=model.REPLICA_AXIS,
        abstract_state=model.abstract_state(orders.shape, mesh),
        local_dir=environment.local_dir,
        persistent_dir=Path(orders.persistent_dir),
    )
    life = environment.restart_count
    if life == 0:
        result = _save_life(contender, site, orders.shape)
    else:
        result = _restore_life(contender, site, Path(orders.expected_path))
    # Linux gives kibibytes; pages of mapped ramdisk files count as well.
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    orders.result_path(life, environment.process_index).write_text(json.dumps(result))
    multihost_utils.sync_global_devices("end of life")
    jax.distributed.shutdown()


def _save_life(
    contender: contenders.Contender, site: contenders.Site, shape: Shape
) -> dict[str, Any]:
    """One save to warm up, the timed ones, and one whose state is donated while it is on its way.

    The timed saves have the cores for themselves, as they have on an accelerator's host. The last
    one shares them with a training step, and is the one that the next life must find intact.
    """
    session = contender.open_session(site)
    session.start_fresh()
    state = model.first_state(site.abstract_state)
    step = 0
    saves = []
    for _ in range(1 + shape.timed_saves):
        state, step = _train(state, step)
        saves.append(_timed_save(session, step, state))
    state, step = _train(state, step)
    expected = model.digests(state)
    with PeakWatch(site.local_dir) as peak:
        donated = _donating_save(session, step, state)
    multihost_utils.sync_global_devices("all saved")
    session.close()
    return {
        "warm_up": saves[0],
        "saves": saves[1:],
        "donated": donated,
        "step": step,
        "digests": expected,
        "peak_ramdisk_bytes": peak.size_bytes,
    }


def _train(state: PyTree, step: int) -> tuple[PyTree, int]:
    for _ in range(STEPS_BETWEEN_SAVES):
        state = model.train_step(state)
    jax.block_until_ready(state)
    # The slowest process's last step must not count as the others' stall.
    multihost_utils.sync_global_devices(f"step {step}")
    return state, step + STEPS_BETWEEN_SAVES


def _timed_save(session: contenders.Session, step: int, state: PyTree) -> dict[str, float]:
    start = time.monotonic()
    session.save(step, state)
    returned = time.monotonic()
    session.wait()
    published = time.monotonic()
    # A process that has nothing to wait for must not train while another still publishes.
    multihost_utils.sync_global_devices(f"published {step}")
    return {"start_s": start, "returned_s": returned, "published_s": published}


def _donating_save(session: contenders.Session, step: int, state: PyTree) -> dict[str, float]:
    start = time.monotonic()
    session.save(step, state)
    returned = time.monotonic()
    jax.block_until_ready(model.train_step(state))
    session.wait()
    return {"start_s": start, "returned_s": returned, "published_s": time.monotonic()}


def _restore_life(
    contender: contenders.Contender, site: contenders.Site, expected_path: Path
) -> dict[str, Any]:
    """From building the checkpointer to values on devices, timed; then the check of each shard."""
    expected = json.loads(expected_path.read_text())
    read_all = model.read_all.lower(site.abstract_state).compile()
    # Also sets up JAX's own collectives, which are part of its start and not of a restore.
    multihost_utils.sync_global_devices("before restore")
    start = time.monotonic()
    session = contender.open_session(site)
    opened = time.monotonic()
    state = jax.block_until_ready(session.restore(expected["step"]))
    restored = time.monotonic()
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
        "verified_shards": sorted(found),
        "verified_bytes": sum(s.data.nbytes for a in state.values() for s in a.addressable_shards),
    }


if __name__ == "__main__":
    main(Orders.read(Path(sys.argv[1])))
