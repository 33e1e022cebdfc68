"""The persistent directory in the whole job: its timeline, and the run's claim on it."""
