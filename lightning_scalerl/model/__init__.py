"""The policy: any causal language model of transformers, and its head."""
