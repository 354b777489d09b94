"""Latency predictions from measured tables."""
