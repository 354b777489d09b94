"""Running an application: requests from node to node, models started and stopped by stages."""
