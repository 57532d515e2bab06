"""vLLM as the sampler: an engine in this process (`generator`), or its HTTP server (started by `serve`; see `client`).

vLLM is an optional extra. It is imported by functions that start an engine and by the module `worker`, which only vLLM
itself loads.
"""
