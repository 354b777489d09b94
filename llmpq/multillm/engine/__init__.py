"""Continuous batching of a process of an application: limits, seconds and a compiled simulator."""
