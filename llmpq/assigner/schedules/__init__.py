"""Schedules: batch sizes and frequencies of RRA and WAA under a latency bound (ExeGPT)."""
