"""Which process stores which shards, and what each choice survives. Pure."""
