"""Hosts that lend their devices: ``llmpq worker`` there, ``--workers`` here."""
