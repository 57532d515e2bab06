"""Words and units of an answer: taken out of its mathematics, and compared where both answers have them.

`12 \\text{ cm}` has the mathematics 12 and the word centimeter. Words on one side only do not decide: 12 is right.
Words on both sides decide: 12 m is wrong. Case, plural, articles and the usual abbreviations of units make no
difference.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_UNITS = {
    "millimeter": "mm millimetre", "centimeter": "cm centimetre", "meter": "m metre", "kilometer": "km kilometre",
    "inch": "in inches", "foot": "ft feet", "yard": "yd yds", "mile": "mi", "gram": "g gm", "kilogram": "kg kgs kilo",
    "milligram": "mg", "pound": "lb lbs", "ounce": "oz", "ton": "tonne", "second": "s sec secs", "minute": "min mins",
    "hour": "h hr hrs", "day": "d", "week": "wk wks", "month": "mo", "year": "yr yrs", "liter": "l litre",
    "milliliter": "ml millilitre", "gallon": "gal", "degree": "deg degrees", "radian": "rad rads",
    "celsius": "c centigrade", "fahrenheit": "f", "kelvin": "k", "dollar": "usd bucks", "cent": "¢", "euro": "eur",
    "percent": "% pct percentage", "newton": "n", "joule": "j", "watt": "w", "volt": "v", "ohm": "Ω", "hertz": "hz",
    "knot": "kt kts", "am": "", "pm": "",
}  # fmt: skip
_CANONICAL = {short: name for name, others in _UNITS.items() for short in (name, *others.split())}
_FILLERS = frozenset((
    "a", "an", "the", "of", "is", "are", "was", "were", "be", "answer", "final", "so", "it", "its", "there", "that",
    "this", "about", "approximately", "approx", "exactly", "total", "in", "to", "each", "unit", "units", "namely",
))  # fmt: skip
CONNECTORS = frozenset({"and", "or"})
_NEGATIONS = frozenset({"not", "no", "never", "none", "without", "non", "except"})
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Words that are no product of variables, also where nothing marks them as text.
_LOGIC = (
    "and|or|not|odd|even|yes|no|true|false|none|prime|positive|negative|undefined|increasing|decreasing|percent|degrees?|"
    "divisible by|multiple of|dollars?|cents?|square|cubic|hundred|thousand|million|billion|trillion|[ap]\\.\\s?m\\.?"
)
_WORD = re.compile(
    r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}(?:\s*\^\s*\{?\s*(\d)\s*\}?)?"  # text, and the exponent of a unit
    r"|\^\s*\{?\s*\\circ\s*\}?(?:\s*([CF])\b(?!\s*[({=]))?"  # degrees
    r"|(\\?%|\\\$)"
    rf"|(?<![A-Za-z\\])((?:{_LOGIC})(?![A-Za-z]))"
    r"|(?<=[\d}])\s+([A-Za-z]{2}[A-Za-z.]*(?:[ /-]+[A-Za-z.]+)*)(?:\^\{?(\d)\}?)?(?=\s*(?:$|,|\\text))"  # 18 dollars
    r"|(?<=\d)((?:cm|mm|km|kg|mg|ml|mL|ft|lbs?|oz|mph|hrs?|mins?|secs?|[ap]m)(?![A-Za-z]))(?:\^\{?(\d)\}?)?",
    re.IGNORECASE,
)
_NO_WORDS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "pi", "sqrt", "infty", "infinity", "inf", "gcd",
    "lcm", "mod",
))  # fmt: skip
_TOKEN = re.compile(r"[ap]\.\s?m\b\.?|[ap]m\b|[a-z%¢Ω]+(?:'[a-z]+)?|/|\d+", re.IGNORECASE)


class Parted(NamedTuple):
    """An answer's mathematics, and its words in order, in canonical form."""

    mathematics: str
    words: tuple[str, ...]
    scaled: str

    @property
    def readings(self) -> tuple[str, ...]:
        """The mathematics, and what it is if "million" is a factor."""
        return (self.mathematics,) if self.scaled == self.mathematics else (self.mathematics, self.scaled)


def part(text: str) -> Parted:
    """Take the words out of a normal text. A word between two expressions is a comma."""
    words: list[str] = []

    def taken(found: re.Match[str], scale: bool) -> str:
        said = found[1] if found[1] is not None else found[5] or found[6] or found[8]
        if found[0].startswith("^"):
            said = "degree" + {"C": " celsius", "F": " fahrenheit", None: ""}.get(found[3] and found[3].upper(), "")
        elif found[4]:
            said = "percent" if "%" in found[4] else "dollar"
        elif found[6] and found[6].split()[0].lower() in _NO_WORDS:
            return found[0]
        power = found[2] or found[7] or found[9]
        here = tokens(said or "", power)
        if not scale:
            words.extend(here)
        if scale and len(here) > 0 and here[0] in SCALES:
            return f" \\cdot 10^{{{SCALES[here[0]]}}} "
        return " , " if CONNECTORS & {*here} else " "

    bare, scaled = (_tidy(_WORD.sub(lambda found, scale=scale: taken(found, scale), text)) for scale in (False, True))
    return Parted(bare, tuple(words), scaled)


def _tidy(text: str) -> str:
    bare = " ".join(text.split())
    return re.sub(r"\s*,(?:\s*,)+", ",", re.sub(r"\s+,", ",", bare)).strip(" ,;:").rstrip(".")


def tokens(text: str, power: str | None = None) -> list[str]:
    """Return the words of a text in canonical form, without articles and other fillers."""
    found: list[str] = []
    raise_next, over = "", False
    for token in _TOKEN.findall(text.lower().replace("mph", "mile/hour")):
        if token in ("/", "per"):
            over = True
            continue
        if token in ("square", "sq", "cubic"):
            raise_next = "^3" if token == "cubic" else "^2"
            continue
        if token in ("squared", "cubed") and found:
            found[-1] += "^3" if token == "cubed" else "^2"
            continue
        word = _canonical(token)
        if word in _FILLERS and not (word == "in" and not found):
            raise_next = "" if word in ("unit", "units") else raise_next
            continue
        found.append(f"{'/' if over else ''}{word}{raise_next}")
        raise_next, over = "", False
    if power and found:
        found[-1] += f"^{power}"
    return found


def _canonical(token: str) -> str:
    if re.fullmatch(r"[ap]\.?\s?m\.?", token):
        return token[0] + "m"
    if token in _CANONICAL:
        return _CANONICAL[token]
    word = token.removesuffix("'s")
    for ending, other in (("ies", "y"), ("xes", "x"), ("ches", "ch"), ("shes", "sh"), ("s", "")):
        if len(word) > 3 and word.endswith(ending) and not word.endswith(("ss", "us", "is")):
            word = word.removesuffix(ending) + other
            break
    return _CANONICAL.get(word, word)


def agree(gold: tuple[str, ...], said: tuple[str, ...], prose: bool = False) -> bool:
    """Return whether the words of two answers may mean the same.

    Connectors are compared with connectors. Of the other words one answer may have more, but no negation.

    Args:
        prose: the second answer is a sentence, so only its units are compared.
    """
    ours, theirs = {*gold} & CONNECTORS, {*said} & CONNECTORS
    if ours and theirs and ours != theirs:
        return False
    ours, theirs = {*gold} - CONNECTORS, {*said} - CONNECTORS
    if prose:
        ours, theirs = ({word for word in those if word.strip("/").split("^")[0] in _UNITS} for those in (ours, theirs))
    if not ours or not theirs:
        return True
    return (ours <= theirs or theirs <= ours) and not (ours ^ theirs) & _NEGATIONS


def plain(text: str) -> str:
    """Return an answer that is only words, in lower case and without articles; empty if it holds anything else."""
    bare = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    if not re.fullmatch(r"[\s()]*[^\W\d_][^\W\d_\s'.,()-]*(?:[\s'.,()-]+[^\W\d_]*)*", bare):
        return ""
    words = re.sub(r"[\s.,()]+", " ", bare).split()
    if len(words) == 1 and len(words[0]) == 1:
        return words[0]
    return " ".join(word for word in (each.casefold() for each in words) if word not in ("a", "an", "the"))
