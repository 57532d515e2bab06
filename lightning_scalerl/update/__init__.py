"""One optimizer step on a batch: forward passes before the update, per-token credit, and the terms of the loss."""
