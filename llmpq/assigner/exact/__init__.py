"""The exact search: the best plan over all pairs and orders, with a proof."""
