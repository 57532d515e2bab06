"""Parse run names, which may contain a seed or labels that a tracker writes there."""

from __future__ import annotations

import re

# The word `seed` and a number, with its separators: `a-seed1`, `a/seed_1`, `seed=1, a`, `a (seed 1)`.
_WORD = re.compile(r"(?:^|[\s_./:,;|-]+|(?=[(\[]))[(\[]?seed[\s_=:.-]*(\d+)[)\]]?(?![A-Za-z0-9])", flags=re.IGNORECASE)
# `a-s1`, `a_s1`: the letter may also mean a stage or a size. It marks a seed only if other runs differ in this number
# alone.
_LETTER = re.compile(r"[-_]s(\d+)$")


def seed_in_name(name: str) -> tuple[str, str, bool] | None:
    """Split a run's name into the rest, the seed, and whether the word `seed` marks the seed; None without a seed.

    The rest is empty if the name is only a seed. A name with two seeds counts as one without a seed.
    """
    words = list(_WORD.finditer(name))
    match = words[0] if len(words) == 1 else None if words else _LETTER.search(name)
    if match is None:
        return None
    rest = (name[: match.start()] + name[match.end() :]).strip(" -_./:,;|")
    return rest, match[1], bool(words)


def is_bare_seed(name: str) -> bool:
    """Return whether a name is only a seed, so that naming the run takes its folder's name too."""
    parts = seed_in_name(name)
    return parts is not None and not parts[0]


def pairs_in(name: str) -> dict[str, str]:
    """Parse `key=value` pairs in a run's name, such as `loss=grpo,seed=1` in Hydra's folders."""
    return dict(re.findall(r"([A-Za-z_][\w.]*)=([^\s,;:/+&=]+)", name))


def labels_in(name: str) -> dict[str, str]:
    """Parse `key: value` labels that make up a run's name, as in charts of grouped runs: `recipe: a, seed: 0`."""
    parts = [re.fullmatch(r"\s*([\w./-]+): (.+?)\s*", part) for part in name.split(",")]
    return {match[1]: match[2] for match in parts if match} if all(parts) else {}
