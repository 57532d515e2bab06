"""Racing held against its rivals on simulated studies; see `__main__`."""
