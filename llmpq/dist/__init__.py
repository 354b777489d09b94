"""Pipelined serving: a master, stages that own tensors, and the frames between them."""
