"""Commands that inspect, read-only, without JAX's backend: a job that runs, or after it died."""
