"""What a person decided: in words, against a cluster, and as limits of a search."""
