"""The default margin of a tie, in a module that imports neither NumPy nor SciPy."""

from __future__ import annotations

MARGIN = 0.02  # asymptotes within this share of the reward's scale are tied, unless told otherwise
