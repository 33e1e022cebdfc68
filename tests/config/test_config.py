"""The configuration: every fault at once, and every field documented and classified."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from orbax.checkpoint import checkpoint_managers as ocm

from emergency_ckpt import CheckpointerConfig, EmergencyCheckpointer
from emergency_ckpt.config import Config, OrbaxFace, run_id_of, settings_table
from emergency_ckpt.core.stall import TimeLimits
from emergency_ckpt.errors import ConfigError
from emergency_ckpt.extras.hang import HangWatch
from emergency_ckpt.extras.striped import Striped
from emergency_ckpt.storage.directory import StorageDirectory

SECRET = "9f1c44d0a7be5b62e38f07cd11a96e5408d3b7722cfa6915e4870b3dd2a1c65f"
MUST_AGREE: dict[str, Any] = {
    "dir": "/elsewhere",
    "run_id": "another-run",
    "replica_axis": 1,
    "mesh": lambda: _mesh(reverse=True),
    "local_save_every": datetime.timedelta(seconds=7),
    "save_every": lambda: [1000, ocm.InitialSavePolicy()],
    "keep_last_n": 3,
    "keep_every_n_steps": 50,
    "preservation_policy": lambda: ocm.LatestN(3),
    "on_preemption": "exit",
    "require": {"peers", "storage"},
    "placement": Striped(2),
    "local_keep_last_n": 2,
    "host_state_remap": lambda: lambda payloads, index, count: payloads[0],
    "non_finite": "off",
}
"""A field, and a value that must be noticed when only some processes have it."""

MAY_DIFFER: dict[str, Any] = {
    "local_dir": "/dev/shm/other",
    "bind_host": "127.0.0.2",
    "bind_port": 4000,
    "secret_file": "/other/secret",
    "device_reads": "pageable",
    "device_copy_bytes": 1 << 20,
    "stall_timeout_s": 1.5,
    "total_timeout_s": 2.0,
    "async_save": False,
    "preemption_grace_s": 6.0,
    "on_event": lambda: print,
}

NEEDS: dict[str, dict[str, Any]] = {
    "keep_every_n_steps": {"keep_last_n": 1},
}
"""What a field is nothing without."""

FIELDS = [row.name for row in settings_table(Config)]


def _mesh(*, reverse: bool = False) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()).reshape(2, -1)
    return jax.sharding.Mesh(devices[::-1] if reverse else devices, ("slice", "fsdp"))


def _value(value: Any) -> Any:
    return value() if isinstance(value, Callable) and not isinstance(value, type) else value


def valid(**settings: Any) -> Config:
    return Config(dir="/persistent/run", local_dir="/dev/shm/eckpt", mesh=_mesh()).set(**settings)


def problems_of(**settings: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        valid(**settings).validated()
    return caught.value.problems


def test_ram_for_too_many_steps() -> None:
    (problem,) = problems_of(local_keep_last_n=65)
    assert "at most 64" in problem


@pytest.fixture
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ECKPT_SECRET", "ECKPT_JOB_SECRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_secret")
def test_require_secret_without_one_is_refused() -> None:
    (problem,) = problems_of(require={"secret"})
    assert problem == (
        "require has 'secret', but neither secret_file nor ECKPT_SECRET gives a secret"
    )
    valid(require=()).validated()


@pytest.mark.usefixtures("no_secret")
def test_require_secret_names_why_a_file_will_not_do(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    (problem,) = problems_of(require={"secret"}, secret_file=str(file))
    assert f"{file} cannot be read" in problem
    file.write_text(SECRET)
    file.chmod(0o600)
    valid(require={"secret"}, secret_file=str(file)).validated()


@pytest.mark.usefixtures("no_secret")
@pytest.mark.parametrize("name", ["ECKPT_SECRET", "ECKPT_JOB_SECRET"])
def test_require_secret_takes_that_of_the_environment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, SECRET)
    valid(require={"secret"}).validated()


def test_every_field_is_classified() -> None:
    """A new field must be put into one of the two tables, and then into ``agreement`` or not."""
    assert sorted([*MUST_AGREE, *MAY_DIFFER]) == sorted(FIELDS)


@pytest.mark.parametrize("name", MUST_AGREE)
def test_agreement_covers(name: str) -> None:
    base = valid(**NEEDS.get(name, {})).validated()
    changed = valid(**{**NEEDS.get(name, {}), name: _value(MUST_AGREE[name])}).validated()
    assert changed.shared_settings() != base.shared_settings()


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_agreement_ignores(name: str) -> None:
    base = valid(**NEEDS.get(name, {})).validated()
    changed = valid(**{**NEEDS.get(name, {}), name: _value(MAY_DIFFER[name])}).validated()
    assert changed.shared_settings() == base.shared_settings()


def test_table_says_which_settings_may_differ() -> None:
    assert [row.name for row in settings_table(Config) if row.may_differ] == [
        name for name in FIELDS if name in MAY_DIFFER
    ]


def test_table_every_default_is_valid_alone() -> None:
    assert [row.name for row in settings_table(Config) if row.problem(row.default)] == []


def test_defaults_are_valid_but_for_the_directories() -> None:
    with pytest.raises(ConfigError) as caught:
        Config().validated()
    assert len(caught.value.problems) == 2
    assert "local_dir is not set" in caught.value.problems[0]
    assert "neither dir nor run_id" in caught.value.problems[1]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"local_dir": "relative"}, "local_dir 'relative' is not an absolute path"),
        ({"local_dir": None}, "local_dir must be a text, not None"),
        ({"dir": ""}, "dir is empty"),
        (
            {"placement": "striped(0)"},
            "placement must be 'all_but_primary', 'striped(",
        ),
        (
            {"placement": 2},
            "placement must be 'all_but_primary', 'striped(",
        ),
        ({"dir": 7}, "dir must be a text, not 7"),
        ({"run_id": "../escape"}, "run_id '../escape' may only have"),
        ({"run_id": ".hidden"}, "run_id '.hidden' may only have"),
        ({"run_id": "x" * 129}, "may only have"),
        ({"run_id": 5}, "run_id must be a text, not 5"),
        ({"bind_host": 7}, "bind_host must be a text"),
        ({"dir": "/ckpt/back\\slash"}, "cannot store arrays below a name with"),
        ({"dir": "/ckpt/run*"}, "cannot store arrays below a name with '*'"),
        ({"dir": "/ckpt/[run]"}, "cannot store arrays below a name with '['"),
        ({"dir": "/ckpt/run?"}, "cannot store arrays below a name with"),
        ({"dir": "/ckpt/gs:/run"}, "cannot store arrays below a name with 'gs:'"),
        ({"dir": "gs://bucket/run#7"}, "store arrays elsewhere"),
        ({"dir": "gs://bucket/a/../run"}, "store arrays elsewhere"),
        ({"dir": "gs:///run"}, "names no bucket"),
        ({"bind_port": -1}, "bind_port must be a whole number of at least 0, not -1"),
        ({"bind_port": 65536}, "bind_port must be at most 65535, not 65536"),
        ({"bind_port": "80"}, "bind_port must be a whole number of at least 0, not '80'"),
        ({"secret_file": b"x"}, "secret_file must be a text"),
        ({"dir": None, "run_id": "r", "save_every": 5}, "is set, but dir is not"),
        ({"local_save_every": -1}, "local_save_every must be a whole number"),
        ({"save_every": 2.5}, "save_every must be a whole number"),
        ({"save_every": np.int64(100)}, "save_every must be a whole number"),
        ({"save_every": True}, "save_every must be a whole number"),
        ({"keep_last_n": 0}, "keep_last_n must be a whole number of at least 1"),
        ({"device_reads": "copy"}, "device_reads must be 'auto', 'pinned_host' or 'pageable', not"),
        (
            {"device_reads": ["auto"]},
            "device_reads must be 'auto', 'pinned_host' or 'pageable', not",
        ),
        ({"device_copy_bytes": -1}, "device_copy_bytes must be a whole number of at least 0"),
        ({"device_copy_bytes": True}, "device_copy_bytes must be a whole number of at least 0"),
        ({"stall_timeout_s": 0}, "stall_timeout_s must be a positive number"),
        ({"stall_timeout_s": None}, "stall_timeout_s must be a positive number"),
        ({"total_timeout_s": -1.0}, "total_timeout_s must be"),
        ({"total_timeout_s": math.nan}, "total_timeout_s must be"),
        ({"total_timeout_s": math.inf}, "total_timeout_s must be"),
        ({"stall_timeout_s": "30"}, "stall_timeout_s must be"),
        ({"stall_timeout_s": True}, "stall_timeout_s must be"),
        ({"preemption_grace_s": 0}, "preemption_grace_s must be a positive number"),
        ({"save_every": datetime.timedelta()}, "save_every must be a positive time, not 0:00:00"),
        ({"local_save_every": datetime.timedelta(-1)}, "local_save_every must be a positive time"),
        ({"save_every": datetime.timedelta.max}, "save_every must be a positive time"),
        ({"save_every": [5, object()]}, "has no should_save"),
        ({"save_every": None}, "a datetime.timedelta, a policy, or a list of them, not None"),
        ({"save_every": [5, "x"]}, "save_every must be a whole number of steps from 0 on"),
        (
            {"local_save_every": ocm.FixedIntervalPolicy(0)},
            "interval of FixedIntervalPolicy must be",
        ),
        ({"preservation_policy": "all"}, "preservation_policy: 'all' has no should_preserve"),
        (
            {"dir": None, "run_id": "r", "save_every": 0, "keep_last_n": 2},
            "keep_last_n is set, but dir is not",
        ),
        (
            {"dir": None, "run_id": "r", "preservation_policy": ocm.LatestN(1)},
            "preservation_policy is set, but dir is not",
        ),
        ({"require": [np.array([1, 2])]}, "require must be a set of"),
        (
            {"save_every": ocm.SpecificStepsPolicy([np.array([1, 2])])},  # type: ignore[list-item]
            "steps of SpecificStepsPolicy must be a collection of steps",
        ),
        ({"keep_every_n_steps": 5}, "keep_every_n_steps is set, but keep_last_n is not"),
        (
            {"preservation_policy": ocm.LatestN(1), "keep_last_n": 2},
            "preservation_policy and keep_last_n are both set",
        ),
        ({"on_preemption": True}, "on_preemption must be 'save', 'exit' or 'ignore', not True"),
        (
            {"dir": None, "run_id": "r", "save_every": ocm.InitialSavePolicy()},
            "save_every is set, but dir is not",
        ),
        ({"replica_axis": "data"}, "replica_axis 'data' is not one of the mesh's axes"),
        ({"replica_axis": 2}, "replica_axis 2 is out of range"),
        ({"replica_axis": -1}, "replica_axis -1 is out of range"),
        ({"replica_axis": 1.5}, "replica_axis must be the name or the number"),
        ({"replica_axis": True}, "replica_axis must be the name or the number"),
        ({"mesh": "slice"}, "mesh must be a jax.sharding.Mesh"),
        ({"dir": "ckpts/run7", "run_id": "r"}, "'ckpts/run7' is not an absolute path"),
        ({"dir": "foo://bar"}, "'foo://bar' cannot be reached by etils.epath, which knows no 'foo"),
        ({"dir": "file://host/bar"}, "reached by etils.epath, which knows no 'file://'"),
        ({"local_dir": "/dev/shm/a\0b"}, "has characters that no name has"),
        ({"secret_file": "/x/\udcff"}, "has characters that no name has"),
        ({"secret_file": ""}, "secret_file is empty"),
        ({"bind_host": ""}, "bind_host is empty"),
        ({"bind_host": "h" * 254}, "is longer than 253 characters"),
        ({"local_dir": "/" + "d" * 4096}, "is longer than 4096 characters"),
        ({"on_event": [1]}, "on_event: 1 is neither a function nor an observer"),
        ({"on_event": "no_such(1)"}, "on_event: there is no extra 'no_such'"),
        ({"on_event": "striped(2)"}, "is an extra, but no observer"),
        ({"on_event": "hang(-1)"}, "a hang watch needs a finite time above 0 s"),
        ({"host_state_remap": "x"}, "host_state_remap must be a function"),
        (
            {"require": {"peer"}},
            "require must be a set of 'secret', 'storage' or 'peers'",
        ),
        ({"require": "peers"}, "or 'peers', not 'peers'"),
        ({"require": [["peers"]]}, "require must be a set of"),
        ({"require": None}, "require must be a set of"),
        ({"dir": None, "run_id": "r", "require": {"storage"}}, "require has 'storage', but dir is"),
    ],
)
def test_each_fault_is_named(settings: dict[str, Any], problem: str) -> None:
    (found,) = problems_of(**settings)
    assert problem in found


class Ambiguous:
    """Neither equal to something nor different from it, as an array or a table of pandas."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value of a comparison is ambiguous")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array(["a", "b"]), Ambiguous()])
@pytest.mark.parametrize("name", FIELDS)
def test_value_without_a_truth_is_a_fault_of_its_setting(name: str, value: Any) -> None:
    (problem,) = problems_of(**{name: value})
    assert name in problem


@pytest.mark.parametrize("value", [np.array([1, 2]), Ambiguous()])
@pytest.mark.parametrize("name", [row.name for row in settings_table(Config) if row.needs])
def test_value_without_a_truth_is_named_without_what_it_needs(name: str, value: Any) -> None:
    problems = problems_of(dir=None, run_id="run", **{name: value})
    assert all(problem.startswith(name) for problem in problems)


@pytest.mark.parametrize(
    "every",
    [
        np.array([1, 2]),
        ocm.FixedIntervalPolicy(cast("Any", np.array([1, 2]))),
        ocm.ContinuousCheckpointingPolicy(minimum_interval_secs=cast("Any", "often")),
    ],
)
def test_fault_of_local_save_every_is_named_without_a_local_dir(every: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(dir="/persistent/run", local_save_every=every).validated()
    (problem,) = caught.value.problems
    assert problem.startswith("local_save_every")


def test_environment_observers_are_checked_with_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ECKPT_OBSERVERS", "hang(60) no_such(1)")
    with pytest.raises(ConfigError, match="there is no extra 'no_such'"):
        valid().validated()
    monkeypatch.setenv("ECKPT_OBSERVERS", "hang(60)")
    own, added = cast("list[object]", valid(on_event=print).validated().on_event)
    assert own is print
    assert isinstance(added, HangWatch)


def test_event_log_without_a_directory_names_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECKPT_EVENT_LOG", raising=False)
    monkeypatch.setenv("ECKPT_OBSERVERS", "event_log")
    with pytest.raises(ConfigError, match=r"'event_log\(/logs/run7\)', or set ECKPT_EVENT_LOG"):
        valid().validated()


def test_all_faults_are_reported_at_once() -> None:
    settings = {
        "local_dir": "relative",
        "dir": 7,
        "run_id": "a/b",
        "bind_port": -5,
        "local_save_every": -1,
        "keep_last_n": 0,
        "bind_host": 2,
        "stall_timeout_s": 0,
        "replica_axis": "nowhere",
    }
    problems = problems_of(**settings)
    assert len(problems) == len(settings)
    for name in settings:
        assert sum(problem.split()[0] == name for problem in problems) == 1, name


@pytest.mark.parametrize("copies", [0, -1, 1.5, math.nan, True, "2", None])
def test_placement_has_a_whole_number_of_copies(copies: Any) -> None:
    with pytest.raises(ConfigError, match="is no placement"):
        Striped(copies)


def test_unknown_setting_changes_nothing() -> None:
    config = Config()
    with pytest.raises(ConfigError) as caught:
        config.set(dir="/x", locl_dir="/y", evry=1)
    assert caught.value.problems == (
        "'evry' is not a setting",
        "'locl_dir' is not a setting; did you mean 'local_dir'?",
    )
    assert config == Config()


@pytest.mark.parametrize("name", ["save_on_stop", "save_timeout_s", "extra_holders", "orbax_item"])
def test_setting_that_is_gone_names_what_to_use_instead(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the setting '{name}' is gone: .{{20}}"):
        Config().set(**{name: True})


def test_set_chains_in_place() -> None:
    config = EmergencyCheckpointer.default_config()
    same = config.set(dir="/x").set(local_dir="/y", keep_last_n=2)
    assert same is config
    assert isinstance(same, CheckpointerConfig)
    assert (config.dir, config.local_dir, config.keep_last_n) == ("/x", "/y", 2)


def test_validation_is_a_copy_with_everything_filled_in() -> None:
    config = valid()
    checked = config.validated()
    assert config.run_id is None
    assert checked.run_id == run_id_of("/persistent/run")
    assert checked.validated() == checked


def test_placement_may_be_given_as_its_text() -> None:
    assert valid(placement="striped(3)").validated().placement == Striped(3)
    same = valid(placement=Striped(3)).validated()
    assert valid(placement="striped(3)").validated().shared_settings() == same.shared_settings()


def test_save_rules_that_differ_are_told_apart() -> None:
    of_seconds = [datetime.timedelta(seconds=seconds) for seconds in (5, 6)]
    rules = [5, 6, *of_seconds, [5, of_seconds[0]], [5, of_seconds[1]], ocm.FixedIntervalPolicy(5)]
    texts = {valid(save_every=rule).validated().shared_settings()["save_every"] for rule in rules}
    assert len(texts) == len(rules)
    assert "datetime.timedelta(seconds=5)" in texts


def test_limits_follow_from_two_settings() -> None:
    usual, short = Config(), Config(stall_timeout_s=4.0, total_timeout_s=8.0)
    assert (usual.start_timeout_s, usual.save_timeout_s, usual.exit_timeout_s) == (120, 120, 30)
    assert (short.start_timeout_s, short.save_timeout_s, short.exit_timeout_s) == (8, 8, 2)
    assert (usual.transfer_timeout_s, short.transfer_timeout_s) == (30, 2)
    assert (usual.time_limits, short.time_limits) == (TimeLimits(60, 14400), TimeLimits(4, 8))
    assert Config(total_timeout_s=20.0).time_limits == TimeLimits(20, 20)


def test_faces_ask_for_names_and_to_wait_for_storage() -> None:
    asked = Config(orbax=OrbaxFace(step_name="ckpt_0", waits_for_storage=True))
    assert (Config().storage_wait_timeout_s, asked.storage_wait_timeout_s) == (0, 14400)
    shared = valid().validated().shared_settings()
    assert valid(orbax=asked.orbax).validated().shared_settings() != shared


def test_requirements_have_no_order() -> None:
    given = ({"peers", "storage"}, ["storage", "peers"], ("peers", "storage", "peers"))
    configs = [valid(require=each).validated() for each in given]
    assert [config.require for config in configs] == [frozenset({"peers", "storage"})] * 3
    assert len({config.shared_settings()["require"] for config in configs}) == 1


def test_path_objects_are_paths() -> None:
    config = valid(dir=Path("/persistent/run"), local_dir=Path("/dev/shm/eckpt"))
    assert config.validated() == valid().validated()


def test_run_id_follows_from_the_directory_alone() -> None:
    assert run_id_of("/a/run") == run_id_of("/a/run/")
    assert run_id_of("/a/run") != run_id_of("/b/run")
    assert run_id_of("/a/run").startswith("run-")
    assert run_id_of("run") == run_id_of(str(Path.cwd() / "run"))
    assert run_id_of("gs://bucket/x").startswith("x-")
    assert run_id_of("gs://bucket/x") == run_id_of("gs://bucket/x/")
    assert run_id_of("gs://bucket/x") != run_id_of("gs://other/x")


@pytest.mark.parametrize(
    "directory", ["/", "/a/ü ü", "gs://b", "/x/" + "n" * 300, "/a/.hidden", "/a/..", "s3://b/-"]
)
def test_derived_run_id_is_a_valid_one(directory: str) -> None:
    assert valid(run_id=run_id_of(directory)).validated().run_id == run_id_of(directory)


def test_keywords_and_config_are_the_same_thing(tmp_path: Path) -> None:
    settings = {"dir": str(tmp_path / "p"), "local_dir": str(tmp_path / "ram")}
    from_config = EmergencyCheckpointer.default_config().set(**settings)
    for build in (from_config.instantiate, lambda: EmergencyCheckpointer(**settings)):
        with build() as checkpointer:
            assert checkpointer.save(step=1, state={}) is False
    assert from_config.run_id is None, "the config may be used again"


def test_faults_are_found_before_anything_is_touched(tmp_path: Path) -> None:
    ramdisk = tmp_path / "ram"
    with pytest.raises(ConfigError) as caught:
        EmergencyCheckpointer(local_dir=str(ramdisk), keep_last_n=-1)
    assert len(caught.value.problems) == 2
    assert not ramdisk.exists()


def test_local_dir_is_not_asked_for_where_nothing_is_saved_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ECKPT_LOCAL_DIR", raising=False)
    config = Config(dir="/persistent/run", local_save_every=0)
    assert config.validated().local_dir == f"/dev/shm/eckpt-{os.geteuid()}"
    monkeypatch.setenv("ECKPT_LOCAL_DIR", "/mnt/ram")
    assert config.validated().local_dir == "/mnt/ram"
    with pytest.raises(ConfigError, match="local_dir is not set"):
        config.set(local_save_every=5).validated()


def test_urls_of_this_hosts_files_are_their_paths() -> None:
    config = Config(dir="file:///mnt/a%20b/run", local_dir="file:///dev/shm/x").validated()
    assert (config.dir, config.local_dir) == ("/mnt/a b/run", "/dev/shm/x")
    assert config.run_id == run_id_of("/mnt/a b/run") == run_id_of("file:///mnt/a%20b/run")
    storage = StorageDirectory("file:///mnt/a%20b/run", 1.0)
    assert (str(storage.path), storage.is_object_store) == ("/mnt/a b/run", False)
