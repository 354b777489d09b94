"""Constraints of a request: manual decisions, limits, deadline, average bits."""
