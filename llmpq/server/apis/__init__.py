"""APIs of the server: each turns its bodies into one request type, and deltas into its answers."""
