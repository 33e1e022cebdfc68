"""Calls of the coordination service without an answer: repeated for a while, and safely."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from emergency_ckpt.cluster import coordination
from emergency_ckpt.cluster.coordination import JaxCoordinator
from emergency_ckpt.errors import CoordinationError, DeadlineExceeded

UNAVAILABLE = "UNAVAILABLE: failed to connect to all addresses"


class Client:
    """The client of JAX's service, whose connection breaks for so many calls.

    Attributes:
      is_done: a call that gets no answer has its effect all the same.
      calls: all calls so far.
    """

    def __init__(self, broken: int, *, is_done: bool = False) -> None:
        self.values: dict[str, bytes] = {}
        self.broken, self.is_done = broken, is_done
        self.calls = 0

    def _answer(self, work: Any) -> Any:
        self.calls += 1
        if self.broken:
            self.broken -= 1
            if self.is_done:
                work()
            raise jax.errors.JaxRuntimeError(UNAVAILABLE)
        return work()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        def put() -> None:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS: key")
            self.values[key] = value

        self._answer(put)

    def key_value_try_get_bytes(self, key: str) -> bytes:
        def find() -> bytes:
            if key not in self.values:
                raise jax.errors.JaxRuntimeError("NOT_FOUND: key")
            return self.values[key]

        return self._answer(find)

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        def get() -> bytes:
            if key not in self.values:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: key")
            return self.values[key]

        return self._answer(get)

    def key_value_dir_get_bytes(self, name: str) -> list[tuple[str, bytes]]:
        return self._answer(lambda: list(self.values.items()))

    def key_value_delete(self, name: str) -> None:
        self._answer(self.values.clear)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_REPEAT_PAUSE_S", 0.0)


def of(client: Client) -> JaxCoordinator:
    return JaxCoordinator(client, "job", 0, 2)


@pytest.mark.parametrize("is_done", [False, True], ids=["lost", "done, answer lost"])
def test_call_without_an_answer_is_repeated(is_done: bool) -> None:
    client = Client(0, is_done=is_done)
    coordinator = of(client)
    client.broken = 2
    coordinator.put("key", b"1")
    assert client.values == {"job/key": b"1"}
    client.broken = 2
    assert coordinator.find("key") == b"1"
    client.broken = 2
    assert coordinator.find("none") is None
    client.broken = 2
    assert coordinator.get("key", 5.0) == b"1"
    client.broken = 2
    assert list(coordinator.list("").values()) == [b"1"]
    client.broken = 2
    coordinator.replace("key", b"2")
    assert client.values == {"job/key": b"2"}
    client.broken = 2
    coordinator.delete("key")
    assert client.values == {}


@pytest.mark.parametrize("broken", [0, 1])
def test_key_that_another_process_has_set_is_refused(broken: int) -> None:
    client = Client(broken)
    client.values["job/key"] = b"of another"
    with pytest.raises(CoordinationError, match="ALREADY_EXISTS"):
        of(client).put("key", b"own")
    assert client.values == {"job/key": b"of another"}


def test_key_of_the_same_value_is_refused_at_the_first_try() -> None:
    client = Client(0)
    client.values["job/key"] = b"1"
    with pytest.raises(CoordinationError, match="ALREADY_EXISTS"):
        of(client).put("key", b"1")


def test_answers_are_not_asked_for_again() -> None:
    client = Client(0)
    with pytest.raises(DeadlineExceeded):
        of(client).get("key", 0.01)
    assert client.calls == 1


def test_service_that_has_ended_costs_the_time_of_repeats_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordination, "_REPEAT_S", 0.05)
    client = Client(1 << 60)
    coordinator = of(client)
    with pytest.raises(CoordinationError, match="UNAVAILABLE"):
        coordinator.put("key", b"1")
    assert client.calls > 1
    before = client.calls
    for _ in range(3):
        with pytest.raises(CoordinationError, match="UNAVAILABLE"):
            coordinator.find("key")
    assert client.calls == before + 3
    client.broken = 1
    with pytest.raises(CoordinationError, match="UNAVAILABLE"):
        coordinator.put("key", b"1")
    coordinator.put("key", b"1")  # it has answered
    client.broken = 1
    assert coordinator.find("key") == b"1"
