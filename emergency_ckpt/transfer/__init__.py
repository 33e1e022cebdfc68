"""Shards and host states between peers: an authenticated server and client over TCP.

``PROTOCOL.md`` beside this file is the specification.
"""
