"""The trained model: any causal language model of transformers, how it is loaded, run, adapted, sharded and saved."""
