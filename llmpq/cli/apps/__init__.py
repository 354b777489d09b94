"""llmpq-apps: applications of several models."""
