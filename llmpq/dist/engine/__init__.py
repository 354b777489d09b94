"""The engine: what to run at each step, and the stage that runs it."""
