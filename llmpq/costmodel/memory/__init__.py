"""Predicted memory of a stage."""
