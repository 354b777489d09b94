"""Start, watch, restart and stop the processes of a run."""
