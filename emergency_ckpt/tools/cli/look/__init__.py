"""The commands that look: read-only, without JAX's backend, while a job runs or after it died."""
