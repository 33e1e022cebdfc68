"""P7: what ``save`` does in the training thread, counted call by call on two real processes.

And what a restore asks of peers.
"""

from __future__ import annotations

from job_results import Results, results_of

DUE, NOT_DUE = (5, 10, 15, 20), (2, 4, 6, 19)
# To run anything on the devices, to talk to anybody, or to write to storage leads through these.
# Asking JAX's preemption manager is allowed: it looks at a flag of its own process, and talks to
# the service only once a notice has come.
LOUD = (
    "_socket",
    "emergency_ckpt._native",
    "emergency_ckpt.cluster.coordination",
    "emergency_ckpt.cluster.peers",
    "emergency_ckpt.save.vote",
    "emergency_ckpt.ram.tier",
    "emergency_ckpt.storage.tier",
    "emergency_ckpt.transfer",
    "jax._src.compiler",
    "jax._src.dispatch",
    "jax._src.distributed",
    "jax._src.interpreters",
    "jax._src.pjit",
    "orbax",
    "socket",
)
# All that a step without a save enters: the decision, JAX's flag of a preemption and ours, and the
# note of the step, with its time and thread, that observers read.
DECIDING = (
    "_thread",
    "builtins",
    "contextlib",
    "emergency_ckpt.checkpointer",
    "emergency_ckpt.cluster.preemption",
    "emergency_ckpt.config.settings",
    "emergency_ckpt.core.save.save_rules",
    "emergency_ckpt.observer",
    "emergency_ckpt.save.announcements",
    "emergency_ckpt.save.saver",
    "emergency_ckpt.save.schedule",
    "jax.experimental.multihost_utils",
    "time",
)


# What the extras of a launched job enter: the progress that the supervisor reads, and an event of
# the step in the queue of the event log. Neither is part of the library that a job runs without.
LAUNCHED = (
    "emergency_ckpt.events",
    "emergency_ckpt.extras.event_log",
    "emergency_ckpt.extras.progress",
    "queue",
)


# What the first call enters besides, where the process writes to storage: the start of a thread,
# which imports what the first save to storage needs.
FIRST = (
    "_weakrefset",
    "concurrent.futures._base",
    "concurrent.futures.thread",
    "emergency_ckpt.background",
    "emergency_ckpt.save.persistent.save",
    "emergency_ckpt.save.save_work",
    "threading",
    "weakref",
)


results = results_of("quiet_job.py", hosts=1)


def saves(results: Results) -> Results:
    assert all("value" in result["saving"] for result in results), results
    return [result["saving"]["value"] for result in results]


def test_saves_took_place(results: Results) -> None:
    for steps in saves(results):
        assert [int(step) for step, seen in steps.items() if seen["started"]] == list(DUE)


def test_no_call_of_the_coordination_service(results: Results) -> None:
    for steps in saves(results):
        assert [seen["coordination"] for seen in steps.values()] == [{}] * len(steps)
        # The counting works: the vote calls it, in its own thread.
        assert all(steps[str(step)]["coordination elsewhere"] >= 3 for step in DUE)
        assert all(steps[str(step)]["coordination elsewhere"] == 0 for step in NOT_DUE)


def test_no_call_to_a_peer(results: Results) -> None:
    for steps in saves(results):
        assert [seen["transfer"] for seen in steps.values()] == [{}] * len(steps)
        assert all(steps[str(step)]["transfer elsewhere"] >= 1 for step in DUE)
        assert all(steps[str(step)]["transfer elsewhere"] == 0 for step in NOT_DUE)


def test_nothing_is_run_on_devices_sent_or_written(results: Results) -> None:
    for steps in saves(results):
        for step, seen in steps.items():
            loud = [name for name in seen["modules"] if name.startswith(LOUD)]
            assert loud == [], step


def test_step_without_a_save_touches_nothing(results: Results) -> None:
    """State and host state of these steps raise when they are looked at."""
    for steps in saves(results):
        for step in NOT_DUE:
            assert sorted({*steps[str(step)]["modules"]} - {*DECIDING, *LAUNCHED}) == []
        assert [
            name for name in steps["1"]["modules"] if name not in DECIDING + LAUNCHED + FIRST
        ] == []


def test_no_process_waits_for_another(results: Results) -> None:
    for result in results:
        assert result["one_after_the_other"] == {
            "value": {"started": [True, True], "steps": [5, 10]}
        }


def test_leader_of_a_restore_asks_for_no_manifest_but_its_own(results: Results) -> None:
    """Process 0 leads the restore, and has lost its RAM, so it fetches one manifest with shards."""
    first, second = (result["restoring"]["value"] for result in results)
    assert first["fetch_contents"] == 1
    assert first["fetch_shards"] >= 1
    assert second == {}
