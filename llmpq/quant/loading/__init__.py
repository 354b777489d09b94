"""Load and quantize the layers of a stage."""
