"""Mutants of our source, and whether the tests notice them; see `__main__.py`."""
