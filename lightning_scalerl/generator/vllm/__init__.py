"""vLLM as the sampler: its engine in this process (`generator`), or its HTTP server (`serve` starts it, `client` asks).

vLLM is an extra. Only the functions that start an engine import it, and `worker`, which only vLLM imports.
"""
