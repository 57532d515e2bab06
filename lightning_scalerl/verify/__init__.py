"""Verifiers of completions, and the processes that they run in."""
