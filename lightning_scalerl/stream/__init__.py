"""Prompts -> groups -> TrainBatch: what comes before the training step."""
