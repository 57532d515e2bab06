"""vLLM as the sampler: an engine in this process (`generator`), or its HTTP server (`serve` starts it, `client` uses it).

vLLM is an optional extra. Only functions that start an engine import it, and `worker`, which only vLLM imports.
"""
