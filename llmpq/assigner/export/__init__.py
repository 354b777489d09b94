"""Plans as commands and settings of other engines: vLLM, SGLang, llama.cpp."""
