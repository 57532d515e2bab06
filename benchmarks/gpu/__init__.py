"""What a GPU does: a CPU's curve, memory and speed of training steps at 0.6B, and vLLM's server beside them."""
