"""The name of the coordinator's host is a loopback address on that host, as on Debian.

Two hosts are two network namespaces with a link. JAX's service is reached by each host at the
address that its resolver would give.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import JOBS, TESTS

from benchmarks.dcn.links import Links, NotPossible, linked_hosts

pytestmark = pytest.mark.timeout(300)
_PORT = 47123
"""Free in a namespace that has nothing else."""
_TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Links]:
    try:
        with linked_hosts(2, 10000.0) as links:
            yield links
    except NotPossible as reason:
        pytest.skip(str(reason))


def run(hosts: Links, root: Path, bind_host: str = "") -> list[dict[str, Any]]:
    """Run process 0 on the coordinator's host and process 1 on the other; return what each saw."""
    resolved = ("127.0.1.1", hosts.addresses[0])
    paths = os.pathsep.join(map(str, (JOBS, TESTS / "support")))
    started = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", hosts.namespaces[process]),
                *(sys.executable, str(JOBS / "loopback_name_program.py"), str(root)),
                *(str(process), f"{resolved[process]}:{_PORT}"),
                bind_host if process == 0 else "",
            ],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    return [json.loads(each.communicate(timeout=_TIMEOUT_S)[0]) for each in started]


def test_host_named_by_a_loopback_address_saves_and_serves(hosts: Links, tmp_path: Path) -> None:
    assert run(hosts, tmp_path) == [{"failed": 0, "restored": 1}] * 2


def test_loopback_address_given_beside_hosts_ends_the_start(hosts: Links, tmp_path: Path) -> None:
    for seen in run(hosts, tmp_path, "127.0.0.1"):
        assert seen["error"] in {"ConfigError", "RestoreFailed"}, seen
        assert f"such as {hosts.addresses[1]}, cannot reach 127.0.0.1" in seen["text"]
        assert "bind_host is set to it; set bind_host to this host's address" in seen["text"]
