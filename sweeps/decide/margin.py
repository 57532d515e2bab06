"""How close is a tie, where neither NumPy nor SciPy need be imported to say so."""

from __future__ import annotations

MARGIN = 0.02  # asymptotes within this share of the reward's scale are tied, unless told otherwise
