"""Mutation testing of our source; see `__main__.py`."""
