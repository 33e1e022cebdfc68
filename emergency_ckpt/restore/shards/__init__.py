"""Shards of one restore: read, fetched from peers, checked, and put into slots."""
