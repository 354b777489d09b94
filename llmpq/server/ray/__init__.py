"""Ray: hosts, engines and servers as actors that it places; ours decide and carry frames."""
