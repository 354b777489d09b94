"""Sizes that the runtime uses and the cost model counts."""

from __future__ import annotations

from typing import Final

SHARED_FROM_BYTES: Final = 256 * 1024
"""Payloads from this size on lie in memory that the ranks of one host share."""
SHARED_BUFFERS: Final = 2
"""Payloads of one link that can be under way, or in the reader's hands, at once."""
