"""When a step is saved, by agreement of all processes, and which steps are kept. Pure."""
