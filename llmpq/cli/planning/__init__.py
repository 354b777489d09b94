"""What ``llmpq-algo`` and ``llmpq-check`` plan and say: requests, fleets, fits and trust."""
