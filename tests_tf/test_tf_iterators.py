"""``tf.data`` iterators as host state: alone, and on every process of a job that loses a host."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from iterator_lives import check, lives
from running_jobs import job_root

from emergency_ckpt.errors import HostStateError, HostStateTooLarge
from emergency_ckpt.state import host_state
from emergency_ckpt.types import SaveId

SAVE = SaveId(3, "0198f2c4a1b0-5e9d", "run")


def pipeline(count: int = 100) -> Any:
    return tf.data.Dataset.range(count).shuffle(32, seed=5).batch(2)


def test_iterator_goes_on_where_it_was_captured() -> None:
    iterator = iter(pipeline())
    for _ in range(3):
        next(iterator)
    data = host_state.encode(SAVE, 0, 1, host_state.capture({"data": [iterator]}))
    wanted = [next(iterator).numpy().tolist() for _ in range(4)]
    payload = host_state.decode(data).payload
    for other in (iterator, iter(pipeline())):  # in place, and in another life
        host_state.apply({"data": [other]}, payload)
        assert [next(other).numpy().tolist() for _ in range(4)] == wanted


def test_state_over_the_limit_is_refused() -> None:
    def noise(number: Any) -> Any:  # what is alike would be compressed; 72 MB
        return tf.random.stateless_uniform([9000], seed=[number, 1])

    wide = tf.data.Dataset.range(4000).map(noise).shuffle(2000)
    iterator = iter(wide)
    next(iterator)
    payload = host_state.capture(iterator)
    with pytest.raises(HostStateTooLarge, match="keep less in the iterator"):
        host_state.encode(SAVE, 0, 1, payload)


def test_pipeline_that_calls_python_is_refused_by_name() -> None:
    signature = tf.TensorSpec((), tf.int32)
    generated = tf.data.Dataset.from_generator(lambda: iter(range(9)), output_signature=signature)
    with pytest.raises(HostStateError, match=r"host_state\['data'\].*get_state failed"):
        host_state.capture({"data": iter(generated)})


def test_state_of_something_else_is_refused() -> None:
    class Other:
        def get_state(self) -> dict[str, Any]:
            return {"index": b"", "data": 7}

        def set_state(self, state: object) -> None:
            raise AssertionError

    with pytest.raises(HostStateError, match="not an iterator's state"):
        host_state.apply(iter(pipeline()), host_state.capture(Other()))


@pytest.mark.timeout(900)
def test_job_continues_with_the_next_batch_from_ram_and_storage() -> None:
    with job_root() as root:
        found = lives(root, "tf")
    check(found["tf_host_lost"], "local")
    check(found["tf_ram_lost"], "persistent")
