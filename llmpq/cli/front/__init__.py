"""``llmpq``: one program with verbs, and those that need nothing but a model."""
