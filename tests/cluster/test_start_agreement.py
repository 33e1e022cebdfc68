"""The first round of a start, over threads: equal settings, or an error on all at once."""

from __future__ import annotations

import pytest
from memory_coordination import MemoryService, everywhere

from emergency_ckpt.cluster.membership import agree_settings, tell_problem
from emergency_ckpt.errors import ConfigError, DeadlineExceeded

LONG_S = 60.0
SOON_S = 0.2


def test_start_with_equal_settings_has_one_name() -> None:
    services = MemoryService(3), MemoryService(3)
    names = [
        everywhere(3, lambda p, s=service: agree_settings(s.member(p), {"dir": "'/a'"}, LONG_S))
        for service in services
    ]
    assert len(set(names[0])) == len(set(names[1])) == 1
    assert names[0][0] != names[1][0]


def test_start_with_differing_settings_fails_on_all() -> None:
    service = MemoryService(3)
    tables = [{"dir": "'/a'", "run_id": "'r'"}, {"dir": "'/b'", "run_id": "'r'"}]

    def work(process: int) -> str:
        return agree_settings(service.member(process), tables[process % 2], LONG_S)

    for error in everywhere(3, work):
        assert isinstance(error, ConfigError)
        line = "dir differs between the processes: '/a' at processes 0, 2; '/b' at process 1"
        assert error.problems == (line,)


@pytest.mark.parametrize("invalid", [0, 2])
def test_start_with_an_invalid_config_waits_for_nobody(invalid: int) -> None:
    """Process 1 never comes: the others hear of the invalid setting nevertheless."""
    service = MemoryService(4)

    def work(process: int) -> str:
        member = service.member(process)
        if process == 1:
            return "absent"
        if process == invalid:
            tell_problem(member, ConfigError(["local_dir is not set"]))
            return "told"
        return agree_settings(member, {"dir": "'/a'"}, LONG_S)

    found = everywhere(4, work)
    assert (found[1], found[invalid]) == ("absent", "told")
    for process in {0, 2, 3} - {invalid}:
        assert isinstance(found[process], ConfigError)
        assert f"process {invalid}: " in str(found[process])
        assert "local_dir is not set" in str(found[process])


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_start_without_a_process_names_it_everywhere(
    absent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emergency_ckpt.cluster.round._TOLD_LATE_S", SOON_S)
    service = MemoryService(3)

    def work(process: int) -> str:
        if process == absent:
            return "absent"
        return agree_settings(service.member(process), {}, SOON_S)

    found = everywhere(3, work)
    for process in {0, 1, 2} - {absent}:
        assert isinstance(found[process], DeadlineExceeded)
        assert found[process].missing == (f"process {absent}",)


def test_follower_waits_once_inside_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``get`` that runs into its deadline costs the service memory until the key is set.

    The leader is one process and looks again and again, for the errors of others; the followers
    may be thousands.
    """
    monkeypatch.setattr("emergency_ckpt.cluster.round._FIRST_INSPECTION_S", 0.01)
    monkeypatch.setattr("emergency_ckpt.cluster.round._LONGEST_SLICE_S", 0.01)
    monkeypatch.setattr("emergency_ckpt.cluster.round._TOLD_LATE_S", SOON_S)
    service = MemoryService(2)
    follower, waits = service.member(1), list[str]()

    def get(key: str, timeout_s: float) -> bytes:
        waits.append(key)
        return type(follower).get(follower, key, timeout_s)

    monkeypatch.setattr(follower, "get", get)
    with pytest.raises(DeadlineExceeded, match="process 0"):
        agree_settings(follower, {"dir": "'/a'"}, SOON_S)
    assert waits == ["settings.told"]


def test_leader_waits_twice_as_long_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same reason: a process may be missing for the whole timeout."""
    monkeypatch.setattr("emergency_ckpt.cluster.round._FIRST_INSPECTION_S", 0.01)
    monkeypatch.setattr("emergency_ckpt.cluster.round._LONGEST_SLICE_S", 0.04)
    leader, slices_s = MemoryService(2).member(0), list[float]()

    def get(key: str, timeout_s: float) -> bytes:
        slices_s.append(timeout_s)
        return type(leader).get(leader, key, timeout_s)

    monkeypatch.setattr(leader, "get", get)
    with pytest.raises(DeadlineExceeded, match="process 1"):
        agree_settings(leader, {"dir": "'/a'"}, 2.0)
    assert slices_s[:4] == [0.01, 0.02, 0.04, 0.04]


def test_start_tells_hosts_that_loopback_addresses_shut_out() -> None:
    service = MemoryService(3)
    hosts = ["127.0.0.1", "10.0.0.2", "10.0.0.1"]
    found = everywhere(3, lambda p: agree_settings(service.member(p), {}, LONG_S, hosts[p]))
    assert [outside for _, outside in found] == [("10.0.0.1", "10.0.0.2")] * 3


def test_invalid_setting_that_is_no_unicode_is_told_to_all() -> None:
    service = MemoryService(2)
    tell_problem(service.member(1), ConfigError(["dir is caf\udce9, a file"]))
    with pytest.raises(ConfigError, match=r"process 1: .*caf\\udce9, a file"):
        agree_settings(service.member(0), {}, LONG_S)
