"""Explanations of a plan: binding constraints, infeasibility, comparisons."""
