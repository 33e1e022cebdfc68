"""What several benchmarks share: a job, its state, the contenders, the machine."""
