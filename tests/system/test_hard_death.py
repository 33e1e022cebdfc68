"""A process dies without a word while another one waits for it in ``save``."""

from __future__ import annotations

from running_jobs import job_root, run_life, spec_of


def told_by_survivor(program: str) -> str:
    with job_root() as root:
        run_life(spec_of(root, "death_job.py", program, hosts=1), root)
        text = (root / "survivor").read_text()
    assert "process 1 has died: its connections were closed" in text
    return text


def test_save_names_who_died_while_its_arrays_wait() -> None:
    """Before, it came back when JAX aborted the process."""
    text = told_by_survivor("killed_before_a_collective")
    assert text.startswith("PeerLeft: "), text


def test_save_names_who_died_while_it_waits_for_storage() -> None:
    """Before, it waited for as long as storage was slow."""
    text = told_by_survivor("killed_while_storage_is_slow")
    assert text.startswith("SaveFailed: save step 10 to the persistent tier: "), text
