"""Baselines: what people do without a planner."""
