"""The agreement of a start on the job's secret, and values sealed with a key derived from it."""
