"""The answer that a completion states: which part of it counts.

The first of these that a completion has:

1. the last `\\boxed{...}` or `\\fbox{...}` whose braces close; boxes separated by nothing but a comma, a semicolon,
   "and" or "or" are one list;
2. the last `<answer>...</answer>`, if it comes after that box;
3. the text behind the last `####`, if it is a number or an expression, or words up to the end;
4. the rest of the line behind the last "answer is", "Answer:" or their Chinese forms;
5. the end of the completion, in which math-verify looks for the last expression.

Every pattern runs in time proportional to the text: a model that repeats itself writes a megabyte.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Longer answers are not parsed: parsing time grows with length.
MAX_CHARACTERS = 1000
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Braces, and escaped characters, so that an escaped brace is skipped.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Text allowed between two boxes of one list. Without a comma, "and" or "or" the last box replaces the earlier one.
_BETWEEN = re.compile(
    r"(?:[\s$~]|\\[()\[\],;! ]|\\q?quad\b)*+(?:[,;]|\\text\{|(?=and\b|or\b))[\s$~,;&}\\()\[\]!]*+"
    r"(?:(?:and|or)\b)?[\s$~}\\()\[\],;!]*+"
)
_SEPARATORS = 60
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_TAG_END = re.compile(r"</answer>", re.IGNORECASE)
# GSM8K's mark with a number or an expression behind it. A Markdown heading looks the same, with words behind it.
# Both patterns start at the first # of a run and stop at the next mark, so that no character is read once per mark.
_MARKED = re.compile(r"(?<!#)#{4,}+\s*+(?![A-Za-z]{2})(\S[^\n]*)")
# Words behind the mark, and nothing more: an answer that is a word.
_MARKED_WORD = re.compile(r"(?<!#)#{4,}+\s*+([A-Za-z](?:[^\n:#]|#(?!###))*+)\Z")
_LEAD_IN = re.compile(r"(?:\banswers?[*_\s]*+(?:is\b|are\b|[:=：])|答案(?:是|为)?)[\s*_:=：]*+", re.IGNORECASE)
# The end of a sentence: a full stop that is not a decimal point or an abbreviation's.
_SENTENCE_END = re.compile(r"[。！？]|[.!?](?=\s+[A-Z\"'(]|\s*$)")


class Stated(NamedTuple):
    """An answer as a completion states it.

    Args:
        text: the answer, empty if there is none.
        marked: whether all of `text` is the answer; else the answer is the last expression in `text`.
        prose: the end of the completion, where the answer came behind words such as "the answer is"; else empty.
    """

    text: str
    marked: bool
    prose: str = ""


def stated(text: str) -> Stated:
    """Return the answer that a completion states, by the list in this module's docstring."""
    box, box_end = _boxes(text)
    tag, tag_end = _tagged(text)
    if tag is not None and tag_end > box_end:
        inner = stated(tag) if box is not None and _BOX.search(tag) else Stated(tag.strip(), True)
        return inner
    if box is not None:
        return Stated(box, True)
    marked = [*_MARKED.finditer(text), *_MARKED_WORD.finditer(text.rstrip())]
    if marked:
        return Stated(marked[-1][1].strip(), True)
    end = text.rstrip("# \n\t").strip()[-MAX_CHARACTERS:]  # a mark with nothing behind it states nothing
    line = _behind_lead_in(end)
    return Stated(line, True, end) if line else Stated(end, False)


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` whose braces close, in one pass; else None."""
    spans = _closed_boxes(text)
    return text[spans[-1][1] : spans[-1][2]].strip() if spans else None


def _closed_boxes(text: str) -> list[tuple[int, int, int]]:
    """Return (start of the command, start of the content, end of the content) of closed boxes, by their start."""
    starts = {found.end() - 1: found.start() for found in _BOX.finditer(text)}
    if not starts:
        return []
    open_braces: list[int] = []
    spans: list[tuple[int, int, int]] = []
    for found in _BRACE.finditer(text, min(starts)):
        if found[0] == "{":
            open_braces.append(found.start())
        elif found[0] == "}" and open_braces:
            first = open_braces.pop()
            if first in starts:
                spans.append((starts[first], first + 1, found.start()))
    return sorted(spans)


def _boxes(text: str) -> tuple[str | None, int]:
    """Return the last box, or the list of boxes that ends with it, and where it ends."""
    spans = _closed_boxes(text)
    if not spans:
        return None, -1
    chain = [spans[-1]]
    for span in reversed(spans[:-1]):
        following = chain[-1][0]
        if span[2] + 1 > following or following - span[2] > _SEPARATORS:
            break
        if not _BETWEEN.fullmatch(text, span[2] + 1, following) or len(chain) > MAX_CHARACTERS:
            break
        chain.append(span)
    contents = [text[start:end].strip() for _, start, end in reversed(chain)]
    joined = contents[-1] if len(set(contents)) == 1 else ", ".join(contents)
    return joined, chain[0][2]


def _tagged(text: str) -> tuple[str | None, int]:
    """Return the content of the last closed `<answer>`, and where it ends."""
    ends = [found.start() for found in _TAG_END.finditer(text)]
    starts = [found.end() for found in _TAG.finditer(text)]
    if not ends or not starts or starts[0] > ends[-1]:
        return None, -1
    start = max(start for start in starts if start <= ends[-1])
    return text[start : ends[-1]], ends[-1]


def _behind_lead_in(text: str) -> str:
    """Return the rest of the line, or of the sentence, behind the last "answer is"; empty if there is none."""
    ends = [found.end() for found in _LEAD_IN.finditer(text)]
    if not ends:
        return ""
    line = text[ends[-1] :].split("\n", 1)[0]
    ended = _SENTENCE_END.search(line)
    return line[: ended.start() if ended else None].strip()
