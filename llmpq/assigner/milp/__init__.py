"""The assignment as an integer program."""
