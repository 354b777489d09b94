"""Facts of a model, each from all the files that state it."""
