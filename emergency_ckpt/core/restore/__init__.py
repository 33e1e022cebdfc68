"""Which step is restored, and where each process gets its part of it. Pure."""
