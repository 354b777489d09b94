"""The exact search: the best plan over all pairs and orders, with a proof.

``search.solve_exact`` is the entry point, ``method.find_exact`` the planning method.
"""

from llmpq.assigner.exact.lattice import Orders
from llmpq.assigner.exact.native import NotCoveredError
from llmpq.assigner.exact.search import ExactResult, PairProof, SearchStats, solve_exact
from llmpq.assigner.problem import SearchSpace

__all__ = [
    "ExactResult",
    "NotCoveredError",
    "Orders",
    "PairProof",
    "SearchSpace",
    "SearchStats",
    "solve_exact",
]
