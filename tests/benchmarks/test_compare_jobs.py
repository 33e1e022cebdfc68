"""Jobs, losses and counters of the comparison."""

import pytest

from benchmarks.common import traffic
from benchmarks.common.job import (
    FROM_STORAGE,
    HALVES_LOST,
    NOTHING_LOST,
    SCENARIOS,
    SLICE_LOST,
    lost_hosts,
    parse_job,
)
from benchmarks.common.lives import scenarios_of


def test_job_is_slices_hosts_mib_and_leaves() -> None:
    shape = parse_job("2x1x125/2000", 3)
    assert (shape.slices, shape.hosts_per_slice, shape.leaves) == (2, 1, 2000)
    assert shape.state_bytes == 2000 * 64 * 1024
    assert shape.name == "2x1x125/2000"
    assert parse_job("4x2x256", 3).leaves == 16


@pytest.mark.parametrize("text", ["", "2x1", "2x1x16/", "ax1x16", "2x1x16/4/4", "-2x1x16"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SLICESxHOSTSxMIB"):
        parse_job(text, 3)


def test_half_lost_slices_leave_every_shard_but_no_slice_whole() -> None:
    for job in ("2x2x16", "4x2x16", "2x4x16"):
        shape = parse_job(job, 1)
        lost = lost_hosts(HALVES_LOST, shape)
        assert lost is not None
        hosts = shape.hosts_per_slice
        left = [host for host in range(shape.process_count) if host not in lost]
        assert {host // hosts for host in lost} == set(range(shape.slices))
        assert {host % hosts for host in left} == set(range(hosts))


def test_slices_of_one_host_have_no_halves() -> None:
    assert lost_hosts(HALVES_LOST, parse_job("4x1x16", 1)) is None
    assert lost_hosts(SLICE_LOST, parse_job("4x1x16", 1)) == (0,)
    assert lost_hosts(SLICE_LOST, parse_job("2x2x16", 1)) == (0, 1)
    assert lost_hosts(NOTHING_LOST, parse_job("2x2x16", 1)) == ()


def test_only_what_a_contender_and_a_job_can_have_is_run() -> None:
    one_host = parse_job("2x1x16", 1)
    assert list(scenarios_of(["storage"], one_host, SCENARIOS)) == [FROM_STORAGE]
    assert HALVES_LOST not in list(scenarios_of(["ram", "storage"], one_host, SCENARIOS))
    assert list(scenarios_of(["ram"], parse_job("2x2x16", 1), SCENARIOS)) == [
        NOTHING_LOST, SLICE_LOST, HALVES_LOST,
    ]  # fmt: skip


TABLE = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:   12345      10    0    0    0     0          0         0    12346      10    0    0
 veth0: 9876543210   7     0    0    0     0          0         0      100       1    0    0
"""


def test_bytes_are_read_from_the_kernels_table() -> None:
    assert traffic.parse(TABLE) == {"lo": [12345, 12346], "veth0": [9876543210, 100]}
    assert "lo" in traffic.counters()


def test_traffic_over_links_leaves_the_loopback_out() -> None:
    before, after = {"lo": [10, 10], "a": [1, 2]}, {"lo": [15, 15], "a": [4, 3], "b": [100, 7]}
    assert traffic.over_links(before, after, traffic.RECEIVED) == 103
    assert traffic.over_links(before, after, traffic.SENT) == 8
