"""Device types: their figures, what they compute, and the files that describe them."""
