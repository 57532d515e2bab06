"""Computation of one optimizer step on a batch: passes before the update, per-token credit, the terms of the loss."""
