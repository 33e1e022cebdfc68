"""Division of the reads from storage where all processes run on one machine. Pure."""
