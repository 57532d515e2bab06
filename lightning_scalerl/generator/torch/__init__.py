"""Our own sampler: token by token with torch, in the trainer's process or in a child, deterministic on a CPU."""
