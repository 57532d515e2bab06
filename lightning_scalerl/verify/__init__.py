"""Verifiers: what says whether a completion is right, and the processes they run in."""
