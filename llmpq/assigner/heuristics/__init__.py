"""Fast approximate planners, and the baselines of the paper."""
