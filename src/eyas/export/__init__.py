"""The trained drafter as a folder that SGLang and vLLM load."""
