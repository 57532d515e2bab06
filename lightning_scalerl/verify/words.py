"""Separation of an answer's words and units from its mathematics, and comparison of the words of two answers.

`12 \\text{ cm}` consists of the mathematics 12 and the word centimeter. If this is the gold answer, 12 without words is
right too, but 12 m is wrong: words must agree if both answers have them. Case, plural, articles and the usual
abbreviations of units do not matter.
"""

from __future__ import annotations

import re
from functools import partial
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
POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Words that are never a product of variables, even outside of \text{}.
_LOGIC = (
    "and|or|not|odd|even|yes|no|true|false|none|prime|positive|negative|undefined|increasing|decreasing|percent|degrees?|"
    "divisible by|multiple of|dollars?|cents?|square|cubic|hundred|thousand|million|billion|trillion|[ap]\\.\\s?m\\.?"
)
_WORD = re.compile(
    r"\\text\{(?P<text>(?:[^{}]|\{[^{}]*\})*)\}(?:\s*\^\s*\{?\s*(?P<power>\d)\s*\}?)?"  # with the exponent of a unit
    r"|(?P<degree>\^\s*\{?\s*\\circ\s*\}?)(?:\s*(?P<scale>[CF])\b(?!\s*[({=]))?"
    r"|(?P<sign>\\?%|\\\$)"
    rf"|(?<![A-Za-z\\])(?P<logic>(?:{_LOGIC})(?![A-Za-z]))"
    # "18 dollars": words after a number, up to the end or a comma
    r"|(?<=[\d}])\s+(?P<behind>[A-Za-z]{2}[A-Za-z.]*(?:[ /-]+[A-Za-z.]+)*)(?:\^\{?(?P<power_behind>\d)\}?)?"
    r"(?=\s*(?:$|,|\\text))"
    # "18cm": a unit directly after a number
    r"|(?<=\d)(?P<unit>(?:cm|mm|km|kg|mg|ml|mL|ft|lbs?|oz|mph|hrs?|mins?|secs?|[ap]m)(?![A-Za-z]))"
    r"(?:\^\{?(?P<power_unit>\d)\}?)?",
    re.IGNORECASE,
)
_FUNCTION_NAMES = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "pi", "sqrt", "infty", "infinity", "inf", "gcd",
    "lcm", "mod",
))  # fmt: skip
_TOKEN = re.compile(r"[ap]\.\s?m\b\.?|[ap]m\b|[a-z%¢Ω]+(?:'[a-z]+)?|/|\d+", re.IGNORECASE)


class AnswerParts(NamedTuple):
    """Mathematics and words of an answer.

    Attributes:
        mathematics: the answer without its words.
        words: the answer's words in canonical form, in order.
        scaled: the mathematics, with words such as "million" converted to factors.
    """

    mathematics: str
    words: tuple[str, ...]
    scaled: str

    @property
    def readings(self) -> tuple[str, ...]:
        """Mathematics without words such as "million"; if there are any, also the mathematics with them as factors."""
        return (self.mathematics,) if self.scaled == self.mathematics else (self.mathematics, self.scaled)


def separate_words(text: str) -> AnswerParts:
    """Separate a normalised text into mathematics and words; in the mathematics, "and" and "or" become commas."""
    words: list[str] = []
    scaled = False

    def without_words(match: re.Match[str], scale: bool = False) -> str:
        nonlocal scaled
        matched_words = _words_of(match)
        if matched_words is None:
            return match[0]
        power = next((POWERS_OF_TEN[word] for word in matched_words[:1] if word in POWERS_OF_TEN), None)
        if scale and power:
            return f" \\cdot 10^{{{power}}} "
        if not scale:
            words.extend(matched_words)
            scaled = scaled or power is not None
        return " , " if CONNECTORS & {*matched_words} else " "

    bare = _tidy(_WORD.sub(without_words, text))
    return AnswerParts(
        bare, tuple(words), _tidy(_WORD.sub(partial(without_words, scale=True), text)) if scaled else bare
    )


def _words_of(match: re.Match[str]) -> list[str] | None:
    """Return the words in a match of `_WORD` in canonical form; None if the match is a mathematical function."""
    if match["degree"]:
        scale = {"C": " celsius", "F": " fahrenheit"}.get((match["scale"] or "").upper(), "")
        return canonical_words(f"degree{scale}")
    if match["sign"]:
        return ["percent" if "%" in match["sign"] else "dollar"]
    if match["behind"] and match["behind"].split()[0].lower() in _FUNCTION_NAMES:
        return None
    matched = match["text"] or match["logic"] or match["behind"] or match["unit"] or ""
    return canonical_words(matched, match["power"] or match["power_behind"] or match["power_unit"])


def _tidy(text: str) -> str:
    """Remove surplus white space, commas and a final full stop, which the removed words leave behind."""
    bare = " ".join(text.split())
    return re.sub(r"\s*,(?:\s*,)+", ",", re.sub(r"\s+,", ",", bare)).strip(" ,;:").rstrip(".")


def canonical_words(text: str, power: str | None = None) -> list[str]:
    """Return the words of a text in canonical form, without articles and other fillers.

    "square" and "cubic" become the exponent of the next word, "per" a slash before it. The last word gets the exponent
    `power`.
    """
    words: list[str] = []
    next_power, per = "", False
    for token in _TOKEN.findall(text.lower().replace("mph", "mile/hour")):
        if token in ("/", "per"):
            per = True
            continue
        if token in ("square", "sq", "cubic"):
            next_power = "^3" if token == "cubic" else "^2"
            continue
        if token in ("squared", "cubed") and words:
            words[-1] += "^3" if token == "cubed" else "^2"
            continue
        word = _canonical(token)
        if word in _FILLERS:
            next_power = "" if word in ("unit", "units") else next_power
            continue
        words.append(f"{'/' if per else ''}{word}{next_power}")
        next_power, per = "", False
    if power and words:
        words[-1] += f"^{power}"
    return words


def _canonical(token: str) -> str:
    if re.fullmatch(r"[ap]\.?\s?m\.?", token):
        return token[0] + "m"
    if token in _CANONICAL:
        return _CANONICAL[token]
    word = token.removesuffix("'s")
    for ending, replacement in (("ies", "y"), ("xes", "x"), ("ches", "ch"), ("shes", "sh"), ("s", "")):
        if len(word) > 3 and word.endswith(ending) and not word.endswith(("ss", "us", "is")):
            word = word.removesuffix(ending) + replacement
            break
    return _CANONICAL.get(word, word)


def agree(gold: tuple[str, ...], stated: tuple[str, ...], prose: bool = False) -> bool:
    """Return whether the words of two answers are compatible. An answer without words is compatible with any.

    Connectors ("and", "or") must be equal if both answers have them. Of the other words, one answer may have more than
    the
    other, but the additional words must not contain a negation.

    Args:
        gold: words of the gold answer.
        stated: words of the stated answer.
        prose: True if the stated answer is a sentence. Then only units are compared.
    """
    gold_set, stated_set = {*gold} & CONNECTORS, {*stated} & CONNECTORS
    if gold_set and stated_set and gold_set != stated_set:
        return False
    gold_set, stated_set = {*gold} - CONNECTORS, {*stated} - CONNECTORS
    if prose:
        gold_set, stated_set = (
            {word for word in side if word.strip("/").split("^")[0] in _UNITS} for side in (gold_set, stated_set)
        )
    if not gold_set or not stated_set:
        return True
    return (gold_set <= stated_set or stated_set <= gold_set) and not (gold_set ^ stated_set) & _NEGATIONS


def words_only(text: str) -> str:
    """Return an answer of words only, in lower case and without articles; "" if it contains anything else."""
    bare = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    if not re.fullmatch(r"[\s()]*[^\W\d_][^\W\d_\s'.,()-]*(?:[\s'.,()-]+[^\W\d_]*)*", bare):
        return ""
    words = re.sub(r"[\s.,()]+", " ", bare).split()
    if len(words) == 1 and len(words[0]) == 1:
        return words[0]
    return " ".join(word for word in map(str.casefold, words) if word not in ("a", "an", "the"))
