"""The assignment as integer programs: the oracle of the exact search, and its fallback."""
