"""The secret of a start: compared with the settings where given, else made up by process 0."""

from __future__ import annotations

import pytest
from memory_coordination import MemoryService, everywhere

from emergency_ckpt.cluster import membership
from emergency_ckpt.cluster.membership import (
    agree_settings,
    forget_secret,
    secret_text,
    share_secret,
)
from emergency_ckpt.errors import ConfigError, DeadlineExceeded
from emergency_ckpt.run_secret import OwnSecret, generate_secret

LONG_S = 60.0
SECRET = b"9f1c44d0a7be5b62e38f07cd11a96e5408d3b7722cfa6915e4870b3dd2a1c65f"
GIVEN = OwnSecret(SECRET, "given")
OTHER = OwnSecret(SECRET[::-1], "given")
LAUNCHED = OwnSecret(SECRET, "launcher")


def test_secret_made_up_is_the_same_on_all_and_new_at_each_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "generate_secret", generate_secret)
    starts = [MemoryService(3), MemoryService(3)]
    first, second = (
        set(everywhere(3, lambda p, s=s: share_secret(s.member(p), None, LONG_S))) for s in starts
    )
    assert len(first) == len(second) == 1
    assert first != second
    assert all(len(secret) >= 32 for secret in first | second)


def test_secret_made_up_does_not_stay_in_the_service() -> None:
    service = MemoryService(2)
    everywhere(2, lambda p: share_secret(service.member(p), None, LONG_S))
    for process in (1, 0):
        forget_secret(service.member(process))
    assert service.values == {}


def test_secret_given_is_never_in_the_service() -> None:
    service = MemoryService(2)
    assert everywhere(2, lambda p: share_secret(service.member(p), GIVEN, LONG_S)) == [SECRET] * 2
    assert service.values == {}


def test_secret_that_process_0_does_not_bring_ends_the_wait() -> None:
    with pytest.raises(DeadlineExceeded):
        share_secret(MemoryService(2).member(1), None, 0.05)


@pytest.mark.parametrize("value", [b"", b"short", bytes(5000)])
def test_secret_in_the_service_that_is_none_is_an_error(value: bytes) -> None:
    service = MemoryService(2)
    service.member(0).put("secret", value)
    with pytest.raises(ConfigError, match="32 to 4096"):
        share_secret(service.member(1), None, LONG_S)


@pytest.mark.parametrize("others", [None, OTHER, LAUNCHED])
def test_start_with_different_secrets_fails_and_shows_none(others: OwnSecret | None) -> None:
    service = MemoryService(2)
    texts = [secret_text("run-a", own) for own in (GIVEN, others)]
    results = everywhere(
        2, lambda p: agree_settings(service.member(p), {"secret": texts[p]}, LONG_S)
    )
    for result in results:
        assert isinstance(result, ConfigError)
        assert "secret differs between the processes" in str(result)
        assert SECRET.decode() not in str(result)


def test_text_of_a_secret_is_of_the_secret_and_the_run() -> None:
    assert secret_text("run-a", GIVEN) == secret_text("run-a", OwnSecret(SECRET, "given"))
    assert len({secret_text(run, own) for run in ("run-a", "run-b") for own in (GIVEN, OTHER)}) == 4
