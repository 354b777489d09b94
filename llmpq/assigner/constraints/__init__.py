"""What a user fixes: overrides, limits, deadlines, average bits."""
