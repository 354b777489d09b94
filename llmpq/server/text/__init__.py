"""Chat templates and tokenizers, where need be in processes of their own."""
