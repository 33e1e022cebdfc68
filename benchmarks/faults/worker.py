"""One process of the job that meets faults: ``python worker.py ORDERS.json``.

The first life saves until it is killed. A later one restores what its checkpointer offers, checks
each shard against what the first life had, and saves twice more.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.common import contenders
from benchmarks.common import state as model
from benchmarks.common.job import Shape
from emergency_ckpt.extras.progress import report_step
from emergency_ckpt.tools.job_environment import JobEnvironment
from emergency_ckpt.tools.simulated_job import initialize_job

SAVES_AFTER = 2
_LONGEST_LIFE_S = 600.0


@dataclasses.dataclass(frozen=True)
class Orders:
    """For all processes and lives of an incident, as a JSON file."""

    contender: str
    shape: Shape
    persistent_dir: str
    journals: str
    """Directory of ``life_<n>_process_<p>.jsonl``."""
    last_step: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Orders":
        fields: dict[str, Any] = json.loads(path.read_text())
        return cls(**(fields | {"shape": Shape(**fields["shape"])}))

    def journal(self, life: int, process: int) -> Path:
        return Path(self.journals) / f"life_{life}_process_{process}.jsonl"


def entries(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a journal, also of one that a kill has cut; [] where none is."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if "\n" in line]


def main(orders: Orders) -> None:
    environment = JobEnvironment.from_environ()
    initialize_job(environment)
    life, process = environment.restart_count, environment.process_index
    contender = contenders.load(orders.contender)
    contender.prepare()
    mesh = model.make_mesh(orders.shape)
    abstract = model.abstract_state(orders.shape, mesh)
    session = contender.open_session(
        contenders.Site(
            mesh=mesh,
            replica_axis=model.REPLICA_AXIS,
            abstract_state=abstract,
            tier=contenders.BOTH,
            local_dir=environment.local_dir,
            persistent_dir=Path(orders.persistent_dir),
            bind_host="127.0.0.1",
        )
    )
    with orders.journal(life, process).open("a", buffering=1) as journal:

        def say(**entry: Any) -> None:
            journal.write(json.dumps(entry) + "\n")

        def save(step: int, state: Any) -> None:
            say(begun=step, digests=model.digests(state))
            session.save(step, state)
            session.wait()
            say(complete=step)

        if life == 0:
            session.start_fresh()
            state = model.first_state(abstract)
            for step in range(1, orders.last_step + 1):
                state = jax.block_until_ready(model.train_step(state))
                report_step(step)
                save(step, state)
            time.sleep(_LONGEST_LIFE_S)
            raise TimeoutError("no fault came")
        step, state = session.newest()
        if step is None:
            say(restored=None)
        else:
            # Of any process: one that was killed late may have been late to begin the step.
            begun = {
                shard: digest
                for other in range(environment.process_count)
                for entry in entries(orders.journal(0, other))
                if entry.get("begun") == step
                for shard, digest in entry["digests"].items()
            }
            found = model.digests(state)
            say(restored=step, right=begun.items() >= found.items())
            for more in range(step + 1, step + 1 + SAVES_AFTER):
                state = jax.block_until_ready(model.train_step(state))
                save(more, state)
        session.close()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(Orders.read(Path(sys.argv[1])))
