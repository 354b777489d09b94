"""Measuring devices: the time of one real decoder layer, and of the master's own work.

Writes tables; never reads one, and never plans. ``profiler.device`` needs no torch, so that a
command can look at the machine before it decides how torch is to be started.
"""
