"""Transfer: how hidden states lie in memory on their way from rank to rank.

The tensor side makes the memory (``dist.arena``), the plan side counts it; both read it here.
"""

from __future__ import annotations

from typing import Final

SHARED_FROM_BYTES: Final = 256 * 1024
"""Payloads from this size on lie in memory that the ranks of one host share."""
SHARED_PLACES: Final = 2
"""Payloads of one link that can be under way, or in the reader's hands, at once."""
