"""Latency tables from public databases."""
