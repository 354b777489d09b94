"""The exact search: the best plan over all pairs and orders, with a proof that it is.

``solve_exact`` is the one way in; ``search`` says how it goes about it.
"""

from llmpq.assigner.exact.coverage import NotCoveredError
from llmpq.assigner.exact.lattice import Orders
from llmpq.assigner.exact.result import ExactResult, PairProof, SearchStats
from llmpq.assigner.exact.search import solve_exact
from llmpq.assigner.exact.space import SearchSpace

__all__ = [
    "ExactResult",
    "NotCoveredError",
    "Orders",
    "PairProof",
    "SearchSpace",
    "SearchStats",
    "solve_exact",
]
