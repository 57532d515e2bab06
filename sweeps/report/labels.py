"""Short labels of recipes: parts that all recipes of a study share are left out."""

from __future__ import annotations

from collections.abc import Sequence


def shortened(labels: Sequence[str]) -> dict[str, str]:
    """Return a short label for each recipe, without the `+`-separated parts that all others share.

    Next to `scalerl`, `scalerl+loss=dapo` becomes `loss=dapo`. A label that has only shared parts keeps its first part.
    Labels with different first parts are unchanged, as is a single label.
    """
    parts = {label: label.split("+") for label in labels}
    if len(parts) < 2 or len({split[0] for split in parts.values()}) > 1:
        return {label: label for label in labels}
    # Ignore the baseline, which has no changes: otherwise the other recipes would have no common part.
    departing = [set(split[1:]) for split in parts.values() if len(split) > 1]
    common = set.intersection(*departing) if len(departing) == len(parts) else set()
    short = {
        label: "+".join(part for part in split[1:] if part not in common) or split[0] for label, split in parts.items()
    }
    return short if len(set(short.values())) == len(parts) else {label: label for label in labels}
