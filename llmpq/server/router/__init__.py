"""The router: one OpenAI API in front of several replicas, whose answers pass through unparsed."""
