"""Measurements on a GPU: the same run as on a CPU, memory and speed of training steps at 0.6B, and vLLM's server."""
