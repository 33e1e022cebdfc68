"""The handshake, and the seals of frames and pieces.

1. ``handshake``: client and server prove that both know the run's secret. The session's keys follow
   from the secret, an X25519 exchange, the run id and the server's identity.
2. ``sealing``: each direction seals its frames and pieces with AES-256-GCM and counts them; pieces
   pass between memory or a file and a socket.

Guaranteed: a frame or piece that was altered, repeated, left out, reordered or taken from another
connection raises AuthenticationFailed.

Not guaranteed: protection from a process that knows the secret.
"""
