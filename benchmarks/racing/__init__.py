"""Comparison of racing with other stopping rules on simulated studies; see `__main__`."""
