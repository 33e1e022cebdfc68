"""A process dies without a word while another one waits for it in ``save``."""

from __future__ import annotations

from running_jobs import job_root, run_life, spec_of


def test_save_names_who_died_while_its_arrays_wait() -> None:
    """Before, it came back when JAX aborted the process."""
    with job_root() as root:
        run_life(spec_of(root, "death_job.py", hosts=1), root)
        text = (root / "survivor").read_text()
        assert text.startswith("PeerLeft: "), text
        assert "process 1 has died: its connections were closed" in text
