"""An HTTP server with OpenAI's and vLLM's interface in front of an engine. Needs no torch."""
