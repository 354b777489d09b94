"""Prompts: bodies of requests to tokens, and templates and tokenizers in processes of their own."""
