"""The default margin of a tie. This module imports neither NumPy nor SciPy, so that commands start fast."""

from __future__ import annotations

MARGIN = 0.02  # by default, asymptotes within this fraction of the reward's scale are tied
