"""Ray Serve: replicas as actors that Ray places and restarts, behind our load balancers."""
