"""The round of a start that agrees on the secret, and the strangers who take part in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from memory_coordination import MemoryService, everywhere

from emergency_ckpt.cluster.secret_agreement import Agreed, Exchange, agree_secret, forget_exchange
from emergency_ckpt.core.keys import RunSecret
from emergency_ckpt.errors import ConfigError, DeadlineExceeded, ForgedValue
from emergency_ckpt.run_secret import OwnSecret

LONG_S = 60.0
SOON_S = 1.0
SECRET = b"9f1c44d0a7be5b62e38f07cd11a96e5408d3b7722cfa6915e4870b3dd2a1c65f"
OWN = OwnSecret(SECRET, "given")
TOLD = "secret/hello.told/0"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECKPT_SECRET", raising=False)
    monkeypatch.delenv("ECKPT_JOB_SECRET", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return str(path)


def agree(
    service: MemoryService, secret_file: str | None = None, timeout_s: float = LONG_S
) -> list[Any]:
    return everywhere(
        service.process_count,
        lambda p: agree_secret(service.member(p), "run-a", secret_file, timeout_s),
    )


def test_agree_without_a_secret_makes_one_up_unread() -> None:
    service = MemoryService(3)
    agreed: list[Agreed] = agree(service)
    (secret,) = {found.secret for found in agreed}
    assert len(secret.value) >= 32
    assert not secret.given
    assert all(found.is_made_up for found in agreed)
    assert not [v for v in service.values.values() if secret.value in v]
    assert agree(MemoryService(2))[0].secret != secret


@pytest.mark.parametrize("given", [True, False])
def test_agree_gives_values_a_mark_of_this_start(given: bool, file: str) -> None:
    first, second = MemoryService(2), MemoryService(2)
    old, new = (agree(service, file if given else None) for service in (first, second))
    assert {found.start for found in old}.isdisjoint(found.start for found in new)
    old[0].coordinator.put("plan/1", b"step 7")
    assert old[1].coordinator.get("plan/1", LONG_S) == b"step 7"
    second.values["plan/1"] = first.values["plan/1"]
    with pytest.raises(ForgedValue, match="plan/1"):
        new[1].coordinator.get("plan/1", LONG_S)


def test_agree_on_a_given_secret_tells_the_service_nothing(file: str) -> None:
    service = MemoryService(2)
    agreed: list[Agreed] = agree(service, file)
    assert {found.secret for found in agreed} == {RunSecret("run-a", SECRET, given=True)}
    assert not any(found.is_made_up for found in agreed)
    assert not [v for v in service.values.values() if SECRET[:10] in v]


def test_agree_on_a_launchers_secret_is_no_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECKPT_JOB_SECRET", SECRET.decode())
    agreed: list[Agreed] = agree(MemoryService(2))
    assert {found.secret for found in agreed} == {RunSecret("run-a", SECRET, given=False)}
    assert not any(found.is_made_up for found in agreed)


def test_agree_of_one_process_tells_nobody(file: str) -> None:
    service = MemoryService(1)
    (agreed,) = agree(service, file)
    assert agreed.secret == RunSecret("run-a", SECRET, given=True)
    (agreed,) = agree(service)
    assert not agreed.secret.given
    assert not agreed.is_made_up
    assert not service.values


@pytest.mark.parametrize("configured", [{0}, {1}, {0, 2}])
def test_agree_on_a_secret_that_only_some_have_is_an_error(configured: set[int], file: str) -> None:
    service = MemoryService(3)
    files = {p: file if p in configured else None for p in range(3)}
    for error in everywhere(3, lambda p: agree_secret(service.member(p), "run", files[p], LONG_S)):
        assert isinstance(error, ConfigError)
        assert "the run's secret differs between the processes: process" in str(error)


def test_agree_on_two_secrets_is_everyones_error(file: str, tmp_path: Path) -> None:
    service, another = MemoryService(3), tmp_path / "another"
    another.write_bytes(SECRET[::-1])
    another.chmod(0o600)
    files = [file, str(another), file]
    for error in everywhere(3, lambda p: agree_secret(service.member(p), "run", files[p], LONG_S)):
        assert isinstance(error, ConfigError)
        assert "process 1: has another one than process 0" in str(error)


@pytest.mark.parametrize("broken", [0, 1])
def test_agree_on_a_secret_that_one_cannot_read_is_an_error(broken: int, tmp_path: Path) -> None:
    service = MemoryService(2)
    files = {p: str(tmp_path / "absent") if p == broken else None for p in range(2)}
    for error in everywhere(2, lambda p: agree_secret(service.member(p), "run", files[p], LONG_S)):
        assert isinstance(error, ConfigError)
        assert "absent" in str(error)


def test_agree_compares_the_settings_once_more(file: str) -> None:
    service = MemoryService(2)
    errors = everywhere(
        2,
        lambda p: agree_secret(service.member(p), "run", file, LONG_S, settings=f"settings {p}"),
    )
    for error in errors:
        assert isinstance(error, ConfigError)
        assert "process 1: has other settings" in str(error)


def test_forget_exchange_leaves_nothing_of_the_round() -> None:
    service = MemoryService(2)
    agree(service)
    assert service.values
    forget_exchange(service.member(1))
    assert service.values
    forget_exchange(service.member(0))
    assert not service.values


def recorded_start(secret_file: str | None) -> dict[str, bytes]:
    """Return all that an earlier start of two processes left in its service."""
    service = MemoryService(2)
    agree(service, secret_file)
    return dict(service.values)


def test_agree_with_a_replayed_leader_is_refused(file: str) -> None:
    """The leader is dead; a stranger answers with what it once said."""
    service = MemoryService(2)
    service.values[TOLD] = recorded_start(file)[TOLD]
    with pytest.raises(
        ForgedValue, match=r"secret/hello\.told, to process 1: it is not an answer to this process"
    ):
        agree_secret(service.member(1), "run-a", file, LONG_S)


def test_agree_with_a_replayed_process_gives_it_nothing(file: str) -> None:
    """It said hello in an earlier start; the job goes on without it, until its first deadline."""
    service, recorded = MemoryService(2), recorded_start(file)
    service.values["secret/hello/1"] = recorded["secret/hello/1"]
    agreed = agree_secret(service.member(0), "run-a", file, LONG_S)
    assert not set(service.values.values()) & {recorded[TOLD]}
    with pytest.raises(DeadlineExceeded):
        agreed.coordinator.get("address/1", SOON_S)


def answer_of(own: OwnSecret | None, hello: bytes) -> bytes:
    """Return what a stranger with the secret ``own`` answers process 1 in the leader's place."""
    leader = Exchange("run-a", 0, own, "")
    return leader.answers({0: leader.hello(), 1: hello})[0][1]


@pytest.mark.parametrize("own", [None, OwnSecret(SECRET[::-1], "given")], ids=["none", "another"])
def test_agree_with_a_stranger_for_a_leader_is_refused(own: OwnSecret | None) -> None:
    process = Exchange("run-a", 1, OWN, "")
    found = process.session(answer_of(own, process.hello()))
    assert isinstance(found, str), "what cannot be proved may be an error, never a session"


def test_agree_with_an_unsealed_session_is_refused() -> None:
    """A stranger answers as to a process that was given no secret, and makes one up for it."""
    process, nobody = Exchange("run-a", 1, OWN, ""), Exchange("run-a", 1, None, "")
    assert process.session(answer_of(None, nobody.hello())) is None


@pytest.mark.parametrize("data", [b"", b"x", bytes(100), b"{}" * 20_000])
def test_agree_with_any_bytes_is_refused(data: bytes) -> None:
    for own in (OWN, None):
        assert Exchange("run-a", 1, own, "").session(data) is None
        leader = Exchange("run-a", 0, own, "")
        assert "process 1: has" in str(leader.answers({0: leader.hello(), 1: data})[1])


def test_agree_with_a_key_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    process, leader = Exchange("run-a", 1, None, ""), Exchange("run-a", 0, None, "")
    for public in ("", "zz", "00" * 31, "00" * 32):
        monkeypatch.setattr(process, "_public", public)
        found = leader.answers({0: leader.hello(), 1: process.hello()})[1]
        assert found == "process 1: sent no key of X25519"


def test_agree_with_a_changed_box_is_refused() -> None:
    process, leader = Exchange("run-a", 1, None, ""), Exchange("run-a", 0, None, "")
    answers, session = leader.answers({0: leader.hello(), 1: process.hello()})
    assert process.session(answers[1]) == session
    other = Exchange("run-a", 1, None, "")
    assert other.session(answers[1]) is None
