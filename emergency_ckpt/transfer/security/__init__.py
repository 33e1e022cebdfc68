"""The secret, the handshake, and the seals of frames and pieces."""
