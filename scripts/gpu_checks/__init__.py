"""Checks that need a GPU, each in a process of its own; see ``scripts/gpu_check --help``."""
