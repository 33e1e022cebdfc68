"""Who writes: one lead, one scribe for each host state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emergency_ckpt.core.placement.placement_policies import (
    PersistentWriters,
    Topology,
    host_state_writer,
    owners_of,
    writers,
)

TOPOLOGIES = st.lists(st.integers(0, 3), min_size=1, max_size=9).map(
    lambda slices: Topology(len(slices), tuple(slices))
)


@given(TOPOLOGIES, st.sampled_from(["primary", "striped"]))
def test_each_host_state_has_one_scribe_among_the_writers(
    topology: Topology, which: PersistentWriters
) -> None:
    members = writers(topology, which)
    written = [owner for writer in members for owner in owners_of(writer, topology, members)]
    assert sorted(written) == list(range(topology.process_count))
    assert all(host_state_writer(member, topology, members) == member for member in members)


@pytest.mark.parametrize(("which", "expected"), [("primary", (1, 3)), ("striped", (1, 3, 0, 2))])
def test_process_of_the_first_slice_leads(
    which: PersistentWriters, expected: tuple[int, ...]
) -> None:
    assert writers(Topology(4, (1, 0, 1, 0)), which) == expected
