"""Normalisation of mathematics that can be written in several ways.

`normalise` is applied to the gold answer and the stated answer before they are compared. It changes the notation, never
the meaning. Unicode becomes LaTeX. Style, spacing and thousands separators are removed. Constants and functions in
upright type, such as `\\mathrm{e}`, become plain ones, and periodic decimals become fractions. Words stay in
`\\text{...}` (`words.py` compares them).
"""

from __future__ import annotations

import re
from fractions import Fraction

_SUPERSCRIPT = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni", strict=True))
_SUBSCRIPT = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()", strict=True))
_VULGAR = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
    "⅙": "1/6", "⅚": "5/6", "⅐": "1/7", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8", "⅑": "1/9", "⅒": "1/10",
}  # fmt: skip
_SYMBOLS = {
    **dict.fromkeys("−–‒﹣－", "-"), **dict.fromkeys("\u00a0\u2007\u2009\u202f\u200a\u2002\u2003\u3000", " "),
    **dict.fromkeys("\u200b\u2060\ufeff", ""), **dict.fromkeys("×✕", "\\times "), **dict.fromkeys("·⋅∙", "\\cdot "),
    "÷": "\\div ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "±": "\\pm ", "∓": "\\mp ", "∞": "\\infty ", "∪": "\\cup ",
    "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "°": "^{\\circ}", "º": "^{\\circ}", "π": "\\pi ", "α": "\\alpha ",
    "β": "\\beta ", "γ": "\\gamma ", "δ": "\\delta ", "θ": "\\theta ", "λ": "\\lambda ", "μ": "\\mu ", "φ": "\\phi ",
    "ω": "\\omega ", "ρ": "\\rho ", "σ": "\\sigma ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "、": ",", "。": ".",
    "“": '"', "”": '"', "‘": "'", "’": "'", "✓": "", "✅": "", "⟨": "\\langle ", "⟩": "\\rangle ", "…": "\\ldots ",
    "€": "\\text{ euro}", "£": "\\text{ pound}",
}  # fmt: skip
_CHARACTERS = str.maketrans({**_SYMBOLS, **{chr(0xFF01 + n): chr(0x21 + n) for n in range(94) if n != 12}})
_RAISED = re.compile(f"[{''.join(map(re.escape, _SUPERSCRIPT))}]+")
_LOWERED = re.compile(f"[{''.join(map(re.escape, _SUBSCRIPT))}]+")
_VULGARS = re.compile(f"[{''.join(_VULGAR)}]")
_RADICAL = re.compile(r"([√∛])\s*(\((?:[^()]|\([^()]*\))*\)|\{[^{}]*\}|\d+(?:\.\d+)?|[A-Za-z]|\\pi\b)")

# Commands that only set the style. They have no argument, or an argument that is not mathematics.
_STYLE = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|scriptscriptstyle|bfseries|bf|itshape|it|rmfamily|rm|tiny|scriptsize|footnotesize|small|"
    r"normalsize|large|Large|LARGE|huge|Huge|boldmath|centering|strut|mathstrut|limits|nolimits|checkmark|"
    r"(?:left|right)\s*\.|left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])"
    r"|\\(?:color|pagecolor)\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}|\\(?:hspace|vspace|phantom|hphantom|vphantom|label|tag)\*?\{[^{}]*\}"
)
_SPACE = re.compile(r"(\\\\)|\\(?:[,;:> ]|quad\b|qquad\b|enspace\b|thinspace\b|medspace\b|thickspace\b)|~")
# Commands whose last argument is kept as mathematics, with the number of arguments before it.
_WRAPPERS = {
    **dict.fromkeys(
        (
            "boldsymbol",
            "bm",
            "pmb",
            "mathbf",
            "mathit",
            "mathnormal",
            "mathsf",
            "mathtt",
            "underline",
            "uline",
            "ensuremath",
            "boxed",
            "fbox",
        ),
        0,
    ),
    **dict.fromkeys(("tiny", "small", "large", "Large", "LARGE", "huge", "Huge"), 0),
    **dict.fromkeys(("textcolor", "colorbox"), 1),
}
_TEXTS = (
    "text", "textrm", "textnormal", "textbf", "textit", "textsf", "texttt", "textup", "mbox",
    "hbox", "mathrm", "operatorname", "emph", "mathop",
)  # fmt: skip
_COMMAND = re.compile(rf"\\({'|'.join([*_WRAPPERS, *_TEXTS])})\*?\s*(?=\{{)")
_FUNCTIONS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "coth", "ln",
    "log", "lg", "exp", "gcd", "min", "max", "det", "deg", "dim", "ker", "arg",
))  # fmt: skip
_DELIMITERS = re.compile(r"(\\\\)|\\[()\[\]]|(?<!\\)\$")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(\\[a-zA-Z]+|\d)\s*(\\[a-zA-Z]+|\d)")
_HALF_BRACED = re.compile(r"\\[dtc]?frac\s*(\d|\\pi\b)\s*(?=\{)")
_ROOT = re.compile(r"\\sqrt\s*(\\[a-zA-Z]+|\d)")
_NUMBER = r"(?<![\d.,])\d{1,3}"
_BARE_SPACED = re.compile(rf"{_NUMBER}(?:\s\d{{3}})+(?![\d/.]|\s*\\frac)")
_SPACED = re.compile(rf"{_NUMBER}(?:(?:\{{,\}}|,\s*\\!|\\!|\\,|\\ |~)\s*\d{{3}})+(?!\d)")
_BEFORE_DECIMALS = re.compile(rf"{_NUMBER}(?:,\d{{3}})+(?=\.\d)")
_COMMAED = re.compile(rf"{_NUMBER}(?:,\d{{3}})+(?![\d])")
_PERIODIC = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))(?![\d])")
_ANSWER_IS = re.compile(
    r"^(?:\W|\\text\{)*(?:the|my|our|so|thus|hence|therefore|final|correct|\s)*\banswers?\s*(?:is|are|[:=])*[\s:=]*(\})?",
    re.IGNORECASE,
)


def normalise(text: str) -> str:
    """Return an answer in normalised notation."""
    bare = in_ascii(text)
    bare = _DELIMITERS.sub(lambda match: match[1] or " ", bare)
    bare = _SPACED.sub(_remove_separators, bare)
    bare = _BEFORE_DECIMALS.sub(_remove_separators, _BARE_SPACED.sub(_remove_separators, bare)).replace("\\!", "")
    bare = _unwrap(bare)
    bare = _STYLE.sub(" ", bare)
    bare = _SPACE.sub(lambda match: match[1] or " ", bare).replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    bare = _without_outer_braces(" ".join(bare.split()))
    bare = _ANSWER_IS.sub(lambda match: "" if match[1] or "{" not in match[0] else "\\text{", bare)
    bare = _PERIODIC.sub(_periodic, bare)
    bare = _HALF_BRACED.sub(r"\\frac{\1}", _FRACTION.sub(r"\\frac{\1}{\2}", bare))
    bare = _ROOT.sub(r"\\sqrt{\1}", bare)
    return _trim(bare)


def _remove_separators(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match[0])


def comma_readings(text: str) -> tuple[str, ...]:
    """Return the two readings of plain commas before three digits: as thousands separators, and as commas of a list.

    Outside of brackets, 100,200 is a number or a list. In brackets of numbers it is only a list, unless they contain
    another comma that is followed by a space. If both readings are the same text, it is returned once.
    """
    joined: list[str] = []
    position = 0
    for match in _COMMAED.finditer(text):
        enclosed = _enclosing(text, match.start())
        if enclosed is None or ", " in enclosed or not re.fullmatch(r"[\s\d.,+-]*", enclosed):
            joined += [text[position : match.start()], match[0].replace(",", "")]
            position = match.end()
    separated = _COMMAED.sub(lambda match: match[0].replace(",", ", "), text)
    return tuple(dict.fromkeys(("".join([*joined, text[position:]]), separated)))


def _enclosing(text: str, position: int) -> str | None:
    """Return the content of the round, square or set brackets around a position; None outside of brackets."""
    depth = 0
    for start in range(position - 1, -1, -1):
        if text[start] in ")]" or text[start - 1 : start + 1] == "\\}":
            depth += 1
        elif text[start] in "([" or text[start - 1 : start + 1] == "\\{":
            if depth == 0:
                end = next((n for n in range(position, len(text)) if text[n] in ")]}"), len(text))
                return text[start + 1 : end].rstrip("\\")
            depth -= 1
    return None


def in_ascii(text: str) -> str:
    """Replace mathematical Unicode characters by LaTeX."""
    bare = _RAISED.sub(lambda match: "^{" + "".join(_SUPERSCRIPT[character] for character in match[0]) + "}", text)
    bare = _LOWERED.sub(lambda match: "_{" + "".join(_SUBSCRIPT[character] for character in match[0]) + "}", bare)
    bare = _VULGARS.sub(lambda match: "\\frac{{{}}}{{{}}}".format(*_VULGAR[match[0]].split("/")), bare)
    bare = bare.translate(_CHARACTERS)
    return _RADICAL.sub(lambda match: f"\\sqrt{'[3]' if match[1] == '∛' else ''}{{{_strip_brackets(match[2])}}}", bare)


def _strip_brackets(argument: str) -> str:
    return argument[1:-1] if argument[0] in "({" else argument


def _unwrap(text: str) -> str:
    """Replace each style command by its last argument, and each text command by `\\text`.

    A text command whose argument is mathematics is replaced by the argument.
    """
    closing = _closing_braces(text)

    def walk(start: int, end: int) -> str:
        pieces: list[str] = []
        position = start
        while match := _COMMAND.search(text, position, end):
            pieces.append(text[position : match.start()])
            name, argument = match[1], match.end()
            for _ in range(_WRAPPERS.get(name, 0)):
                argument = closing.get(argument, end) + 1
                while argument < end and text[argument] == " ":
                    argument += 1
            last = closing.get(argument)
            if last is None or last >= end or text[argument] != "{":
                pieces.append(match[0])
                position = match.end()
                continue
            content = text[argument + 1 : last]
            pieces.append(
                f"{{{walk(argument + 1, last)}}}"
                if name in _WRAPPERS
                else _text_argument(name, content, "".join(pieces).rstrip()[-1:])
            )
            position = last + 1
        pieces.append(text[position:end])
        return "".join(pieces)

    return walk(0, len(text))


# Units of one letter. After a number they are text, elsewhere they are variables.
_LETTER_UNITS = frozenset("mgshdlLNJWVKCF")


def _text_argument(name: str, content: str, previous: str) -> str:
    """Return the replacement of a text command: `\\text{...}`, or its bare argument if that is mathematics.

    Mathematics is a number, a constant, a function, or something such as (A).

    Args:
        name: the command.
        content: the command's argument.
        previous: the character before the command.
    """
    bare = content.strip()
    if bare in _FUNCTIONS:
        return f"\\{bare} "
    if name == "mathrm" and bare in ("e", "i", "d"):
        return f" {bare}"
    is_unit = bare in _LETTER_UNITS and (previous.isdigit() or previous == "}")
    if is_unit or re.search(r"[A-Za-z]{2}|[A-Za-z]\.|\\", bare):
        return f"\\text{{{content}}}"
    return content


def _closing_braces(text: str) -> dict[int, int]:
    """Map the position of each opening brace to the position of its closing brace; unclosed braces are left out."""
    pairs: dict[int, int] = {}
    open_braces: list[int] = []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            open_braces.append(match.start())
        elif match[0] == "}" and open_braces:
            pairs[open_braces.pop()] = match.start()
    return pairs


def _without_outer_braces(text: str) -> str:
    for _ in range(20):
        text = text.strip()
        if not (text.startswith("{") and _closing_braces(text).get(0) == len(text) - 1):
            break
        text = text[1:-1]
    return text


def _periodic(match: re.Match[str]) -> str:
    """Convert a match of `_PERIODIC`, such as 0.1\\overline{6}, to a fraction."""
    integer_part, decimals, period = match[1] or "0", match[2], match[3] or match[4]
    if len(integer_part) + len(decimals) + len(period) > 30:
        return match[0]
    shift = 10 ** len(decimals)
    value = Fraction(int(integer_part + decimals), shift) + Fraction(int(period), shift * (10 ** len(period) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator != 1 else str(value.numerator)


# Characters with which no expression begins or ends.
_EMPHASIS = '*_`" '


def _trim(text: str) -> str:
    """Remove quotes, emphasis, final punctuation, a leading plus and brackets around a single number from an answer."""
    for _ in range(4):
        previous = text
        text = re.sub(r"(?<!\\)\\$", "", text.strip())  # the backslash of an escaped space
        text = text.rstrip(f".,;:?{_EMPHASIS}").lstrip(_EMPHASIS)
        text = text[1:-1] if re.fullmatch(r"'[^']*'", text) else text
        bracketed = re.fullmatch(r"[(\[]\s*([+-]?[\d.]+)\s*[)\]]", text)
        text = bracketed[1] if bracketed else re.sub(r"^\+\s*(?=[\d.\\])", "", text)
        if text == previous:
            break
    return text
