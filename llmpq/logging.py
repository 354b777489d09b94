"""Logging: one logger tree, with the rank in every record of a run.

Only ``llmpq.cli`` prints; all other modules log. Log records never contain prompt text.
"""

from __future__ import annotations

import logging
import sys


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``."""
    return logging.getLogger(name)


def configure_logging(level: int = logging.WARNING, rank: int | None = None) -> None:
    """Send the package's records to standard error, prefixed with the rank when there is one.

    Commands and workers call it once at their start; a second call replaces the handler.
    """
    prefix = "" if rank is None else f"[rank {rank}] "
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {prefix}%(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    )
    logger = logging.getLogger("llmpq")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
