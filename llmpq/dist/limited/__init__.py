"""Child processes with limits of time and memory, for what clients send."""
