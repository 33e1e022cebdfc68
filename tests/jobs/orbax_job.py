"""Orbax's emergency manager by its contract: four processes of two devices, slices {0,1}, {2,3}."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from job_process import Iterator, JobProcess, run_program
from orbax.checkpoint import checkpoint_managers as ocm
from orbax_places import (
    EmptyNode,
    Place,
    abstract,
    differences,
    mesh_with,
    save_up_to,
    saved,
    state_at,
)

from emergency_ckpt import orbax as emergency
from emergency_ckpt.errors import HostStateError
from emergency_ckpt.storage import DirectoryWriter


def every_interval(step: int, m: int, n: int) -> Callable[[JobProcess], Any]:
    """Is ``step`` due, after all before it, at intervals m and n?"""

    def program(world: JobProcess) -> Any:
        place = Place(world, f"due_{step}_{m}_{n}")
        options = {"save_interval_steps": m}, {"save_interval_steps": n}
        with place.open(mesh_with(0), *options) as manager:
            save_up_to(manager, step)
            return manager.should_save(step)

    return program


def listed(
    name: str, total: int, local: dict[str, Any], persistent: dict[str, Any], **options: Any
) -> Callable[[JobProcess], Any]:
    """Which steps are there after so many saves, for the manager and for a new one?"""

    def program(world: JobProcess) -> Any:
        place, mesh = Place(world, name), mesh_with(0)
        first = place.open(mesh, local, persistent, **options)
        save_up_to(first, total)
        found = [first.all_steps(), first.latest_step()]
        first.reload()
        found.append(first.all_steps(read=True))
        with place.open(mesh, local, persistent, **options) as second:  # the first is still open
            return [*found, second.all_steps(), second.latest_step(), second.should_save(total - 1)]

    return program


class Odd:
    """A policy of the user's own: saves at odd steps, if it is told the truth about the past."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        assert not context.is_saving_in_progress
        right = [info.step for info in previous_steps] == list(range(1, step.step, 2))
        return right and step.step % 2 == 1


def is_in(*steps: int) -> Callable[[int, int | None], bool]:
    return lambda step, latest: step in steps and (latest is None or latest < step)


KEEP_ALL = {"max_to_keep": 10}
LISTED = {
    "newest_few": (10, {"save_interval_steps": 1, "max_to_keep": 3}, {
        "save_interval_steps": 2, "max_to_keep": 2}),
    "rare_storage": (7, {"save_interval_steps": 2, "max_to_keep": 2}, {"save_interval_steps": 50}),
    "one_local": (5, {"save_interval_steps": 1}, {"save_interval_steps": 3}),
    "period": (9, {"save_interval_steps": 3}, {
        "save_interval_steps": 2, "max_to_keep": 1, "keep_period": 4}),
    "functions": (9, {"should_save_fn": is_in(1, 5, 7), **KEEP_ALL}, {
        "should_save_fn": is_in(1, 2), **KEEP_ALL}),
    "save_policies": (6, {"save_decision_policy": Odd(), **KEEP_ALL}, {
        "save_decision_policy": ocm.SpecificStepsPolicy([0, 4])}),
    "any_policy": (7, {"save_decision_policy": ocm.AnySavePolicy(
        [ocm.FixedIntervalPolicy(3), ocm.SpecificStepsPolicy({5})]), **KEEP_ALL}, {
        "save_interval_steps": 100}),
    "preservation": (9, {"save_interval_steps": 1, "preservation_policy": ocm.LatestN(2)}, {
        "save_interval_steps": 1, "preservation_policy": ocm.AnyPreservationPolicy(
            [ocm.EveryNSteps(4), ocm.LatestN(1)])}),
    "read_only": (3, {"save_interval_steps": 1, "read_only": True}, {"save_interval_steps": 2}),
}  # fmt: skip


def no_waiting(asynchronous: bool) -> Callable[[JobProcess], Any]:
    """Saves as fast as they can be called: none is skipped."""

    def program(world: JobProcess) -> Any:
        place, mesh = Place(world, f"fast_{asynchronous}"), mesh_with(0)
        with place.open(
            mesh,
            {"save_interval_steps": 3, "max_to_keep": 2},
            {"save_interval_steps": 5, "max_to_keep": 3},
            enable_async_checkpointing=asynchronous,
        ) as manager:
            save_up_to(manager, 17, waits=False)
            steps = manager.all_steps(read=True)
            args = saved(17, mesh)
            again = [manager.save(17, args, force=force) for force in (False, True, True)]
            manager.wait_until_finished()
            return [steps, again, manager.all_steps(read=True)]

    return program


def without_storage(axis: int, dimensions: int, asynchronous: bool) -> Callable[[JobProcess], Any]:
    """The persistent directory was emptied: RAM is enough."""

    def program(world: JobProcess) -> Any:
        place = Place(world, f"no_storage_{axis}_{dimensions}_{asynchronous}")
        mesh = mesh_with(axis, dimensions=dimensions)
        with place.open(
            mesh,
            {"save_interval_steps": 1, "max_to_keep": 2},
            {"save_interval_steps": 1, "max_to_keep": 2},
            replica_axis_index=axis,
            enable_async_checkpointing=asynchronous,
        ) as manager:
            save_up_to(manager, 3, waits=False)
            place.lose_storage()
            restored = manager.restore(2)
            return [
                manager.in_primary_slice,
                sorted(restored),
                *(differences(restored.state, 2, mesh),),
            ]

    return program


def without_ram(
    axis: int, dimensions: int, victims: tuple[int, ...]
) -> Callable[[JobProcess], Any]:
    """Local directories were wiped under the manager: what is left of RAM, or storage; then on."""

    def program(world: JobProcess) -> Any:
        place = Place(world, f"no_ram_{axis}_{dimensions}_{len(victims)}")
        mesh = mesh_with(axis, dimensions=dimensions)
        with place.open(
            mesh,
            {"save_interval_steps": 1, "max_to_keep": 2},
            {"save_interval_steps": 2, "max_to_keep": 2},
            replica_axis_index=axis,
        ) as manager:
            save_up_to(manager, 3)
            place.lose_ram(victims)
            wrong = differences(manager.restore(2).state, 2, mesh)
            manager.reload()
            after = manager.all_steps()
            for step in (3, 4, 5):
                manager.save(step, saved(step, mesh))
            manager.wait_until_finished()
            place.lose_storage()
            wrong += differences(manager.restore(5).state, 5, mesh)
            return [wrong, after, manager.all_steps(read=True)]

    return program


def older_then_newer(world: JobProcess) -> Any:
    """Restores read: a newer step in RAM stays until the next save, and only until then."""
    place, mesh = Place(world, "older"), mesh_with(0)
    with place.open(
        mesh,
        {"save_interval_steps": 1, "max_to_keep": 3},
        {"save_interval_steps": 4},
    ) as manager:
        save_up_to(manager, 7)
        wrong = [differences(manager.restore(step).state, step, mesh) for step in (5, 0, 6, 5)]
        before = manager.all_steps()
        assert manager.should_save(6)
        manager.save(6, saved(60, mesh))
        manager.wait_until_finished()
        wrong.append(differences(manager.restore(None).state, 60, mesh))
        return [wrong, before, manager.all_steps(), manager.latest_step()]


def slow_removal(world: JobProcess) -> Any:
    """Process 0 removes a step only after the others have said which there are; then a rollback."""
    place, mesh = Place(world, "slow_removal"), mesh_with(0)
    answers = [place.persistent.with_name(f"{place.name}_{each}") for each in (1, 2, 3)]
    local = {"save_interval_steps": 1}
    stored: dict[str, Any] = {"save_interval_steps": 2, "max_to_keep": 1, "keep_period": 10}
    with late_removals(answers), place.open(mesh, local, stored) as manager:
        for step in range(5):
            manager.save(step, args=saved(step, mesh))
        manager.wait_until_finished()
        found = [manager.all_steps()]
        if world.process:
            answers[world.process - 1].touch()
        like = ocp.args.Composite(state=ocp.args.PyTreeRestore(abstract(mesh)))
        manager.restore(0, args=like)
        for step in range(1, 5):
            found.append([step in manager.all_steps(), manager.save(step, args=saved(step, mesh))])
            manager.wait_until_finished()  # a slot that storage reads would stay longer
        return [*found, manager.all_steps(), manager.all_steps(read=True)]


@contextlib.contextmanager
def late_removals(answers: Sequence[Path]) -> Generator[None]:
    """Removals from storage begin when all ``answers`` are there."""
    remove = DirectoryWriter.remove

    def late(writer: DirectoryWriter, steps: Collection[int], incarnation: str) -> None:
        while not all(each.exists() for each in answers):
            time.sleep(0.05)
        remove(writer, steps, incarnation)

    DirectoryWriter.remove = late
    try:
        yield
    finally:
        DirectoryWriter.remove = remove


def swapped(axis: int) -> Callable[[JobProcess], Any]:
    """The slices have changed places, and the one that is the first now has all the RAM."""

    def program(world: JobProcess) -> Any:
        place, mesh = Place(world, f"swapped_{axis}"), mesh_with(axis)
        options: Any = (
            {"save_interval_steps": 1, "max_to_keep": 4},
            {"save_interval_steps": 10},
        )
        with place.open(mesh, *options, replica_axis_index=axis) as manager:
            save_up_to(manager, 3)
            was_primary = manager.in_primary_slice
        place.lose_ram((0, 1))
        other = mesh_with(axis, swapped=True)
        with place.open(other, *options, replica_axis_index=axis) as manager:
            found = [was_primary, manager.in_primary_slice, manager.all_steps()]
            wrong = differences(manager.restore(2).state, 2, other)
            manager.save(3, saved(3, other))
            manager.wait_until_finished()
            return [*found, wrong, manager.latest_step(), manager.all_steps()]

    return program


def one_slice(
    shape: tuple[int, ...], axis: int, local: bool = False
) -> Callable[[JobProcess], Any]:
    """One slice: persistent steps only, unless RAM is asked for."""

    def program(world: JobProcess) -> Any:
        name = f"one_{'x'.join(map(str, shape))}_{axis}_{local}"
        place = Place(world, name)
        names = ["data"] if len(shape) == 1 else ["replica", "replica"]
        if len(shape) == 2:
            names[shape.index(8)] = "data"
        mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
        with place.open(
            mesh,
            {"save_interval_steps": 3, "max_to_keep": 2, "with_one_slice": local},
            {"save_interval_steps": 5, "max_to_keep": 3},
            replica_axis_index=axis,
        ) as manager:
            save_up_to(manager, 17, waits=False)
            steps = manager.all_steps(read=True)
            wrong = differences(manager.restore(None).state, max(steps), mesh)
            return [manager.in_primary_slice, steps, manager.latest_step(), wrong]

    return program


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def copies(shape: tuple[int, ...]) -> Callable[[JobProcess], Any]:
    """The slice, steps with those in RAM, and what is said of single copies there, of two managers.

    The axis of the index 0 has size 1; where another has replicas, slices are along that.
    """

    def program(world: JobProcess) -> Any:
        place = Place(world, f"copies_{'x'.join(map(str, shape))}")
        mesh = Mesh(np.array(jax.devices()).reshape(shape), ("unused", "replica", "data"))
        is_alone = shape[1] == 1
        said = _Warnings()
        logging.getLogger("absl").addHandler(said)
        found: list[Any] = []
        for _ in range(2):
            with place.open(
                mesh,
                {"save_interval_steps": 1, "max_to_keep": 3, "with_one_slice": is_alone},
                {"save_interval_steps": 50},
            ) as manager:
                if not found:
                    found.append(manager.in_primary_slice)
                    save_up_to(manager, 3)
                found.append(manager.all_steps())
                found.append(differences(manager.restore(None).state, 2, mesh))
        logging.getLogger("absl").removeHandler(said)
        return [*found, [text for text in said.texts if "one copy in RAM" in text]]

    return program


def dataset(world: JobProcess) -> Any:
    """Each process's iterator, JSON, a nesting: of the step of the tensors, from either tier."""
    place, mesh = Place(world, "dataset"), mesh_with(0)
    me = world.process
    options: Any = {"save_interval_steps": 1, "max_to_keep": 2}, {"save_interval_steps": 2}
    iterator, found = Iterator(me), []
    with place.open(mesh, *options) as manager:
        for step in range(4):
            item = {"iterator": iterator.at(step), "epoch": step}
            manager.save(step, saved(step, mesh, dataset=item))
            iterator.at(50)
            manager.wait_until_finished()
        for step in (3, 2, 0, None):
            back = {"iterator": Iterator(-1), "epoch": -1}
            restored = manager.restore(step, ocp.args.Composite(dataset=back))
            assert restored.dataset["iterator"] is back["iterator"]
            at = 3 if step is None else step
            right = back["iterator"].is_at(at, me) and restored.dataset["epoch"] == at
            found.append([right, differences(restored.state, at, mesh)])
        assert "dataset" not in manager.restore(2)
        manager.save(4, saved(4, mesh, dataset=ocp.args.JsonSave({"row": [me, 4]})))
        manager.save(5, saved(5, mesh))
        manager.wait_until_finished()
        json = manager.restore(4, ocp.args.Composite(dataset=ocp.args.JsonRestore()))
        found.append(json.dataset == {"row": [me, 4]})
        try:
            manager.restore(5, ocp.args.Composite(dataset=ocp.args.JsonRestore()))
        except HostStateError as error:
            found.append("none was saved" in str(error))
    place.lose_ram((0, 1, 2, 3))
    with place.open(mesh, *options) as manager:
        json = manager.restore(None, ocp.args.Composite(dataset=ocp.args.JsonRestore()))
        found.append(json.dataset == {"row": [me, 4]})
    return found


def left_out_by_orbax(world: JobProcess) -> Any:
    """Metadata, metrics, best step, removal."""
    place, mesh = Place(world, "extras"), mesh_with(0)
    losses = [3.0, 1.0, 2.0, 1.0, 5.0]
    with place.open(
        mesh,
        {"save_interval_steps": 1, "max_to_keep": 2},
        {"save_interval_steps": 2},
        best_fn=lambda metrics: metrics["loss"],
        best_mode="min",
    ) as manager:
        assert (manager.latest_step(), manager.best_step()) == (None, None)
        for step, loss in enumerate(losses):
            manager.save(
                step,
                saved(step, mesh),
                metrics={"loss": np.float32(loss)},
                custom_metadata={"note": f"step {step}"},
            )
            manager.wait_until_finished()
        found: dict[str, Any] = {"steps": manager.all_steps(), "best": manager.best_step()}
        for step in (0, 3):
            known = manager.metadata(step)
            array = manager.item_metadata(step).state["small"]
            found[f"at {step}"] = [
                known.custom_metadata,
                known.metrics,
                manager.metrics(step),
                known.commit_timestamp_nsecs is not None,
                [list(array.shape), array.dtype.name],
                known.item_metadata.state["empty_node"] == EmptyNode(),
            ]
        for step in (4, 2):
            manager.delete(step)
        found["left"] = [manager.all_steps(), manager.latest_step(), manager.best_step()]
        wrong = differences(manager.restore(None).state, 3, mesh)
        errors = [kind_of(lambda: manager.delete(4)), kind_of(lambda: manager.metadata(4))]
        manager.save(4, saved(4, mesh))
        manager.wait_until_finished()
        found["then"] = [wrong, errors, manager.all_steps()]
    with place.open(mesh) as manager:
        found["next life"] = manager.all_steps()
        for step in manager.all_steps():
            manager.delete(step)
        found["gone"] = [manager.all_steps(), kind_of(lambda: manager.restore(None))]
    return found


def kind_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        return type(error).__name__
    return None


def best_after_a_loss(world: JobProcess) -> Any:
    """The best step in RAM alone, where one process has lost its own; and a ``best_fn`` that fails.

    The steps are 1 and 2, of which the second is the best.
    """
    place, mesh = Place(world, "best"), mesh_with(0)
    local, persistent = {"save_interval_steps": 1, "max_to_keep": 2}, {"read_only": True}

    def opened(best_fn: Callable[[Any], float]) -> emergency.CheckpointManager:
        return place.open(mesh, local, persistent, best_fn=best_fn)

    with opened(lambda metrics: metrics["score"]) as manager:
        for step in (1, 2):
            manager.save(step, saved(step, mesh), metrics={"score": step})
            manager.wait_until_finished()
    place.lose_ram((3,))
    with opened(lambda metrics: metrics["score" if world.process else "none"]) as manager:
        failed = kind_of(manager.best_step)
    with opened(lambda metrics: metrics["score"]) as manager:
        best = manager.best_step()
        return [failed, best, differences(manager.restore(best).state, 2, mesh)]


def refused(world: JobProcess) -> Any:
    """What is not accepted, and that nothing was saved by it."""
    place, mesh = Place(world, "refused"), mesh_with(0)
    state = ocp.args.PyTreeSave(state_at(0, mesh))
    cast = ocp.args.PyTreeSave(
        state_at(0, mesh), jax.tree.map(lambda _: ocp.SaveArgs(dtype=np.float16), state.item)
    )
    bad = {
        "reserved": ocp.args.Composite(state=state, process_metadata=ocp.args.JsonSave({})),
        "no state": ocp.args.Composite(dataset=ocp.args.JsonSave({})),
        "other item": ocp.args.Composite(state=state, params=state),
        "not composite": state,
        "cast": ocp.args.Composite(state=cast),
    }
    with place.open(mesh) as manager:
        kinds = {
            name: kind_of(lambda args=args: manager.save(0, args)) for name, args in bad.items()
        }
        kinds["nothing there"] = kind_of(lambda: manager.restore(None))
        kinds["no such step"] = kind_of(lambda: manager.restore(7))
        steps = manager.all_steps()
    kinds["closed"] = kind_of(lambda: manager.save(0, saved(0, mesh)))
    place = Place(world, "no_directory")
    args = (place.ramdisk, place.persistent, mesh, abstract(mesh))
    kinds["no directory"] = kind_of(lambda: emergency.CheckpointManager(*args))
    return [kinds, steps]


DUE = [(0, 2, 3), (1, 1, 4), (1, 2, 2), (3, 5, 7), (3, 2, 3)]


def asked_by_one(world: JobProcess) -> list[list[int]]:
    """MaxText's question before a save, which only some processes come to."""
    place = Place(world, "asked_by_one")
    options = {"save_interval_steps": 1, "max_to_keep": 2}
    with place.open(mesh_with(0), options, {"save_interval_steps": 3}) as manager:
        save_up_to(manager, 5)
        steps = [manager.all_steps(), manager.all_steps()] if world.process == 1 else []
        world.meet()
        return steps


PROGRAMS: dict[str, Callable[[JobProcess], Any]] = {
    "asked by one": asked_by_one,
    **{f"due {row}": every_interval(*row) for row in DUE},
    **{f"listed {name}": listed(name, *row) for name, row in LISTED.items()},
    "fast async": no_waiting(True),
    "fast sync": no_waiting(False),
    "storage lost, axis 0": without_storage(0, 2, True),
    "storage lost, axis 0, sync": without_storage(0, 2, False),
    "storage lost, axis 1": without_storage(1, 2, True),
    "storage lost, axis 2": without_storage(2, 3, True),
    "all RAM lost, axis 0": without_ram(0, 2, (0, 1, 2, 3)),
    "all RAM lost, axis 1": without_ram(1, 3, (0, 1, 2, 3)),
    "a slice's RAM lost, axis 1": without_ram(1, 2, (2, 3)),
    "older then newer": older_then_newer,
    "slow removal": slow_removal,
    "swapped, axis 0": swapped(0),
    "swapped, axis 1": swapped(1),
    "one slice (8,) 0": one_slice((8,), 0),
    "one slice (8,) 1": one_slice((8,), 1),
    "one slice (1, 8)": one_slice((1, 8), 0),
    "one slice (8, 1)": one_slice((8, 1), 1),
    "one slice with RAM": one_slice((1, 8), 0, local=True),
    "copies (1, 2, 4)": copies((1, 2, 4)),
    "copies (1, 1, 8)": copies((1, 1, 8)),
    "dataset": dataset,
    "left out by Orbax": left_out_by_orbax,
    "best after a loss": best_after_a_loss,
    "refused": refused,
}

if __name__ == "__main__":
    run_program(PROGRAMS)
