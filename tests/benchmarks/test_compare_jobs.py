"""The losses of hosts that the comparison makes."""

from benchmarks.common.job import (
    HALVES_LOST,
    NOTHING_LOST,
    SLICE_LOST,
    lost_hosts,
    parse_job,
)


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
