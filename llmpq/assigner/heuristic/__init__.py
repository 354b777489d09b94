"""Bitwidth transfer, the paper's heuristic, and the quick tables it steps through."""
