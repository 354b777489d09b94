"""Clocks and limits that do not depend on how busy the machine is."""

PATIENCE_S = 600.0
"""How long a test waits for what happens at once on an idle machine: only an error takes longer."""


class CountingClock:
    """A second passes whenever it is read, so that a time limit is a number of steps."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return float(self.reads)
