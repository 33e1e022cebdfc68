"""Parts that several benchmarks share: the job, its state, the contenders, the machine."""
