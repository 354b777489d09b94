"""Logging: one logger tree, and a formatter that says which rank speaks.

Nothing in the package prints except ``llmpq.cli``; everything else asks here for a logger.
Log records never carry prompt text.
"""

from __future__ import annotations

import logging
import sys


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``."""
    return logging.getLogger(name)


def configure_logging(level: int = logging.WARNING, rank: int | None = None) -> None:
    """Send the package's records to standard error, prefixed with the rank when there is one.

    Called once by a command or a worker at its start; calling it again replaces the handler.
    """
    prefix = "" if rank is None else f"[rank {rank}] "
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {prefix}%(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    )
    logger = logging.getLogger("llmpq")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
