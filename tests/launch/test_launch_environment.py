"""The environment of a process, from which it knows its place in the job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch_support import JobEnvironment

from emergency_ckpt.errors import ConfigError

paths = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0/."), min_size=1, max_size=9
).map(lambda name: Path("/ram") / name)


@st.composite
def environments(draw: st.DrawFn) -> JobEnvironment:
    slices, hosts = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    process = draw(st.integers(0, slices * hosts - 1))
    return JobEnvironment(
        coordinator_address=f"127.0.0.1:{draw(st.integers(1, 65535))}",
        process_index=process,
        process_count=slices * hosts,
        slice_index=process // hosts,
        slice_count=slices,
        devices_per_host=draw(st.integers(1, 8)),
        local_dir=draw(paths),
        restart_count=draw(st.integers(0, 99)),
        progress_path=draw(st.none() | paths),
        event_log=draw(st.none() | paths),
    )


@given(environments())
def test_environ_round_trips(environment: JobEnvironment) -> None:
    environ = environment.to_environ()
    assert all(name.startswith("ECKPT_") for name in environ)
    assert JobEnvironment.present(environ)
    assert JobEnvironment.from_environ(environ) == environment


def test_every_missing_or_malformed_variable_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        JobEnvironment.from_environ({"ECKPT_PROCESS_INDEX": "two"})
    assert len(caught.value.problems) == 7
    assert "ECKPT_PROCESS_INDEX is malformed" in str(caught.value)
    assert "ECKPT_LOCAL_DIR is not set" in str(caught.value)
    assert not JobEnvironment.present({})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ECKPT_PROCESS_INDEX": "4"}, "process_index 4 is not in 0..3"),
        ({"ECKPT_SLICE_COUNT": "3"}, "cannot make 3 slices"),
        ({"ECKPT_SLICE_INDEX": "1"}, "does not follow from the process index"),
        ({"ECKPT_COORDINATOR_ADDRESS": "127.0.0.1"}, "must be host:port"),
        ({"ECKPT_COORDINATOR_ADDRESS": "127.0.0.1:70000"}, "must be host:port"),
        ({"ECKPT_DEVICES_PER_HOST": "0"}, "devices_per_host"),
        ({"ECKPT_RESTART_COUNT": "-1"}, "restart_count"),
    ],
)
def test_inconsistent_values_are_refused(changes: dict[str, str], problem: str) -> None:
    environ = JobEnvironment("127.0.0.1:1234", 0, 4, 0, 2, 1, Path("/ram")).to_environ()
    with pytest.raises(ConfigError, match=problem):
        JobEnvironment.from_environ({**environ, **changes})


def test_report_step_without_a_supervisor_does_nothing() -> None:
    program = "from emergency_ckpt.extras.progress import report_step; report_step(3)"
    environ = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=60)


def test_launcher_never_imports_jax() -> None:
    program = (
        "import sys\n"
        "import emergency_ckpt.tools.launch.supervisor, emergency_ckpt.tools.job_environment\n"
        "import emergency_ckpt.tools.cli.launch, emergency_ckpt.tools.cli.main\n"
        "assert not {'jax', 'jaxlib', 'orbax', 'numpy'} & set(sys.modules), 'imported'\n"
    )
    environ = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=60)


def test_process_index_follows_from_the_slice_and_the_host() -> None:
    whole = JobEnvironment("train-slice-0-0.train:8476", 5, 8, 1, 2, 4, Path("/ram"))
    environ = whole.to_environ() | {"ECKPT_HOST_INDEX": "1"}
    assert JobEnvironment.from_environ(environ) == whole  # where both are given, it is the id
    del environ["ECKPT_PROCESS_INDEX"]
    assert JobEnvironment.from_environ(environ) == whole


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ECKPT_HOST_INDEX": "4"}, r"ECKPT_HOST_INDEX '4' is not in 0\.\.3"),
        ({"ECKPT_HOST_INDEX": "-1"}, "ECKPT_HOST_INDEX '-1' is not in"),
        ({"ECKPT_HOST_INDEX": ""}, "ECKPT_HOST_INDEX '' is not in"),
        ({"ECKPT_SLICE_INDEX": "one"}, "ECKPT_SLICE_INDEX is malformed"),
        ({"ECKPT_SLICE_COUNT": "0"}, "ECKPT_HOST_INDEX '1' is not in"),
    ],
)
def test_host_index_that_is_none_is_named(changes: dict[str, str], problem: str) -> None:
    environ = JobEnvironment("a:1234", 5, 8, 1, 2, 4, Path("/ram")).to_environ()
    del environ["ECKPT_PROCESS_INDEX"]
    with pytest.raises(ConfigError, match=problem):
        JobEnvironment.from_environ(environ | {"ECKPT_HOST_INDEX": "1"} | changes)
