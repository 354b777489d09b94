"""Files of a model, read without torch: configuration, headers of the weights, tokenizer."""
