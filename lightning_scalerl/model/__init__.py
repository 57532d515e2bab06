"""Policy of a run: any causal language model of transformers, and its head."""
