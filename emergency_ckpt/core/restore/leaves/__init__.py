"""The leaves that are asked for against those that were saved in a step."""
