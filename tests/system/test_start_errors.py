"""Real jobs whose start must fail: on every process, with the cause, before the deadline."""

from __future__ import annotations

import re

import pytest
from job_results import Results, results_of
from running_jobs import of

pytestmark = pytest.mark.timeout(300)


seen = results_of("start_job.py", slices=2, hosts=1)


def test_start_with_another_dir_names_both_values(seen: Results) -> None:
    for outcome in of(seen, "another_dir"):
        assert outcome["error"] == "ConfigError", outcome
        assert "dir differs between the processes" in outcome["text"]
        assert "persistent_0' at process 0" in outcome["text"]
        assert "persistent_1' at process 1" in outcome["text"]


def test_start_with_another_interval_names_both_values(seen: Results) -> None:
    for outcome in of(seen, "another_interval"):
        assert outcome["error"] == "ConfigError", outcome
        line = "local_save_every differs between the processes: 5 at process 0; 6 at process 1"
        assert line in outcome["text"]


def test_leaf_split_along_the_replica_axis_is_a_config_error(seen: Results) -> None:
    for outcome in of(seen, "split_along_the_axis"):
        assert outcome["error"] == "ConfigError", outcome
        assert "leaf 'w' is split along replica_axis 'slice': slice 0" in outcome["text"]
        assert "set replica_axis to an axis along which no leaf is split" in outcome["text"]


def test_start_with_another_secret_fails_on_all(seen: Results) -> None:
    """Found at the first loss otherwise, when the peers' RAM is needed."""
    for outcome in of(seen, "another_secret"):
        assert outcome["error"] == "ConfigError", outcome
        assert "secret differs between the processes: given, " in outcome["text"]


def test_start_without_a_required_secret_is_refused(seen: Results) -> None:
    for outcome in of(seen, "no_secret_at_one"):
        assert outcome["error"] == "ConfigError", outcome
        assert "require has 'secret', but neither secret_file" in outcome["text"]


def test_start_with_a_made_up_secret_warns_once(seen: Results) -> None:
    told = [outcome["warnings"] for outcome in of(seen, "made_up")]
    assert [len(texts) for texts in told] == [1, 0]
    assert "no secret is given" in told[0][0]
    assert 'require={"secret"}' in told[0][0]


def test_start_with_a_launchers_secret_warns_of_nothing(seen: Results) -> None:
    assert [outcome["warnings"] for outcome in of(seen, "launched")] == [[], []]


def test_start_with_required_storage_refused_fails_on_all(seen: Results) -> None:
    errors = [outcome["error"] for outcome in of(seen, "storage_refuses")]
    assert sorted(errors) == ["PersistentTierError", "RestoreFailed"]
    for outcome in of(seen, "storage_refuses"):
        assert "host_state/probe-" in outcome["text"], outcome


def test_start_with_storage_unknown_to_one_fails_on_all(seen: Results) -> None:
    """At once: the others do not wait for the process that has left."""
    first, second = of(seen, "storage_unknown_to_one")
    assert second[0]["error"] == "ConfigError", second
    assert first[0]["error"] == "PeerLeft", first
    assert "gs:// needs gcsfs" in first[0]["text"]
    for _, again in (first, second):
        assert again["error"] == "", again


def test_start_beside_an_observer_that_fails_is_told(seen: Results) -> None:
    """By name, and the next start finds all processes."""
    first, second = of(seen, "observer_of_one_begins_badly")
    for failing, other, number in ((first, second, 0), (second, first, 1)):
        assert failing[number]["error"] == "OSError", failing
        assert other[number]["error"] == "RestoreFailed", other
        assert f"process {number}: [Errno 28] No space left" in other[number]["text"]
    assert first[2]["error"] == second[2]["error"] == ""


def test_start_without_a_thread_for_notices_leaves_the_job(seen: Results) -> None:
    """Else its ramdisk and port stay taken, and the others wait for it."""
    first, second = of(seen, "no_thread_for_notices")
    assert second[0]["error"] == "RuntimeError", second
    assert first[0]["error"] == "PeerLeft", first
    assert "can't start new thread" in first[0]["text"]
    for _, again in (first, second):
        assert again["error"] == "", again


def test_start_with_a_required_peers_port_closed_fails_on_all(seen: Results) -> None:
    first, second = of(seen, "closed_port")
    assert first["error"] == "PeerUnreachable"
    assert re.search("process 1 at .*@127.0.0.1:.* cannot be reached", first["text"])
    assert second["error"] == "RestoreFailed"
    assert "process 0: start process 1 at " in second["text"]


def test_start_beside_a_peers_closed_port_warns(seen: Results) -> None:
    """Nothing requires the peers, and a save that needs no push would succeed without them."""
    (told,), others = of(seen, "closed_port_told")
    assert others == []
    assert re.search("process 1 at .*@127.0.0.1:.* cannot be reached from this process", told)
    assert "bind_host" in told


def test_start_in_anothers_directory_fails_alike_on_all(seen: Results) -> None:
    first, second = of(seen, "directory_of_another_run")
    assert first == second
    assert first["error"] == "DirectoryInUse", first
    assert "run 'another' saves there" in first["text"]
    assert "eckpt doctor --adopt" in first["text"]


def test_start_that_fails_on_another_process_claims_nothing(seen: Results) -> None:
    first, second = of(seen, "failed_start_in_a_new_directory")
    assert first[0]["error"] == "RestoreFailed", first
    assert "process 1: " in first[0]["text"]
    assert "its port is taken" in second[0]["text"], second
    for _, another in (first, second):
        assert another["error"] == "", another


def test_first_writer_knows_the_life_that_is_over(seen: Results) -> None:
    """The leader has seen it at the start, and another process writes first."""
    for outcome in of(seen, "many_lives"):
        assert outcome == {"saved": True, "whole": [1]}


def test_start_with_an_invalid_setting_fails_on_all(seen: Results) -> None:
    for outcome in of(seen, "invalid_at_one"):
        assert outcome["error"] == "ConfigError", outcome
        assert "local_save_every must be a whole number" in outcome["text"]
