"""Short labels of recipes: parts that all recipes of a study share are left out, and long ones are cut elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


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


def printable(text: str) -> str:
    """Replace every character that cannot be printed, such as a line break, by a question mark."""
    return "".join(ch if ch.isprintable() else "?" for ch in text)


def cut(labels: Sequence[str], limit: int) -> dict[str, str]:
    """Return each label as printable text of at most `limit` characters; different labels stay different.

    A long label is cut where it resembles other labels. If no other label has its beginning and end, the middle is cut.
    Otherwise only a piece that no other label has remains. Labels for which this is impossible are numbered.
    """
    whole = {label: printable(label) for label in labels}
    result: dict[str, str] = {}
    for label, text in whole.items():
        others = [other for name, other in whole.items() if name != label]
        shown = text if len(text) <= limit and text not in others else next(_pieces(text, others, limit), None)
        taken = set(result.values())
        if shown is None or shown in taken:
            numbered = (f"{text[: limit - 1 - len(mark)]}…{mark}" for mark in map(str, range(1, len(labels) + 1)))
            shown = next(each for each in numbered if each not in taken)
        result[label] = shown
    return result


def _pieces(text: str, others: Iterable[str], limit: int) -> Iterator[str]:
    """Yield abbreviations of a text that fit no other text: both of its ends, then a piece of it."""
    others = list(others)
    half = limit // 2
    for head in (half, half // 2, min(half + half // 2, limit - 2)):
        start, end = text[:head], text[head + 1 - limit :]
        if not any(other.startswith(start) and other.endswith(end) for other in others):
            yield f"{start}…{end}"
    pieces = [text[at : at + limit - 2] for at in range(1, len(text) - limit + 2)]
    unique = [piece for piece in pieces if not any(piece in other for other in others)]
    if unique:  # the middle one has the difference near its own middle
        yield f"…{unique[len(unique) // 2]}…"
