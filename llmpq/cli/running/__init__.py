"""What ``llmpq-dist`` does beside answering prompts of its own format."""
