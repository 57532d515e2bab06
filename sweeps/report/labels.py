"""Shorten labels of recipes: leave out parts that all recipes of a study share, and cut labels that are too long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def shorten_labels(labels: Sequence[str]) -> dict[str, str]:
    """Return a short label for each recipe, without the `+`-separated parts that all recipes share.

    `scalerl+loss=dapo` becomes `loss=dapo` if the other recipe is `scalerl`. A label with nothing but shared parts
    becomes its first part. If the first parts differ, or there is only one label, labels are unchanged.
    """
    parts = {label: label.split("+") for label in labels}
    if len(parts) < 2 or len({split[0] for split in parts.values()}) > 1:
        return {label: label for label in labels}
    # Only if every label has parts after the first can these be shared: a baseline without changes has none.
    changes = [set(split[1:]) for split in parts.values() if len(split) > 1]
    common = set.intersection(*changes) if len(changes) == len(parts) else set()
    short = {
        label: "+".join(part for part in split[1:] if part not in common) or split[0] for label, split in parts.items()
    }
    return short if len(set(short.values())) == len(parts) else {label: label for label in labels}


def printable(text: str) -> str:
    """Replace every character that cannot be printed, such as a line break, by a question mark."""
    return "".join(ch if ch.isprintable() else "?" for ch in text)


def cut(labels: Sequence[str], limit: int) -> dict[str, str]:
    """Cut each label to printable text of at most `limit` characters. Different labels stay different.

    The middle of a long label is cut out if no other label has the same beginning and end. Otherwise a piece is kept
    that no other label contains. Without such a piece, the label is cut at the end and numbered.
    """
    texts = {label: printable(label) for label in labels}
    result: dict[str, str] = {}
    for label, text in texts.items():
        others = [other for name, other in texts.items() if name != label]
        abbreviation = text if len(text) <= limit and text not in others else next(_pieces(text, others, limit), None)
        used_names = set(result.values())
        if abbreviation is None or abbreviation in used_names:
            numbered = (f"{text[: limit - 1 - len(mark)]}…{mark}" for mark in map(str, range(1, len(labels) + 1)))
            abbreviation = next(candidate for candidate in numbered if candidate not in used_names)
        result[label] = abbreviation
    return result


def _pieces(text: str, others: Iterable[str], limit: int) -> Iterator[str]:
    """Yield abbreviations of a text that match none of the others: first its two ends, then a piece of it."""
    others = list(others)
    half = limit // 2
    for head in (half, half // 2, min(half + half // 2, limit - 2)):
        start, end = text[:head], text[head + 1 - limit :]
        if not any(other.startswith(start) and other.endswith(end) for other in others):
            yield f"{start}…{end}"
    pieces = [text[at : at + limit - 2] for at in range(1, len(text) - limit + 2)]
    unique = [piece for piece in pieces if not any(piece in other for other in others)]
    if unique:  # in the middle piece, the difference from other labels is near the middle
        yield f"…{unique[len(unique) // 2]}…"
