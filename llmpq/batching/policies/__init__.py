"""Batching policies."""
