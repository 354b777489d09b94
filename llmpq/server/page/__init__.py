"""The page at ``/``: a chat, and the plan that answers it."""
