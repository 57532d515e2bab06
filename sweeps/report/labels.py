"""Short labels of recipes: what all recipes of a study share is left out."""

from __future__ import annotations

from collections.abc import Sequence


def shortened(labels: Sequence[str]) -> dict[str, str]:
    """Return a short label for each: without the parts, set apart by `+`, that all others share.

    `scalerl+loss=dapo` beside `scalerl` is `loss=dapo`. A label that has nothing but what all share keeps its first
    part. Labels that share no first part stay as they are, as does a label that is alone.
    """
    parts = {label: label.split("+") for label in labels}
    if len(parts) < 2 or len({own[0] for own in parts.values()}) > 1:
        return {label: label for label in labels}
    # The baseline has no departures: it does not keep the others from sharing some.
    departing = [set(own[1:]) for own in parts.values() if len(own) > 1]
    common = set.intersection(*departing) if len(departing) == len(parts) else set()
    short = {label: "+".join(part for part in own[1:] if part not in common) or own[0] for label, own in parts.items()}
    return short if len(set(short.values())) == len(parts) else {label: label for label in labels}
