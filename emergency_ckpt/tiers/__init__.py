"""Where bytes live: snapshots, the local tier, host states, the persistent tier."""
