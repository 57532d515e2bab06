"""vLLM as the sampler: an engine in this process (`generator`), or its HTTP server (started by `serve`; see `client`).

vLLM is an optional extra. Only functions that start an engine import it, and `worker`, which only vLLM imports.
"""
