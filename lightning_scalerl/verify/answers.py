"""Extraction of the answer that a completion states.

The answer is the first of these that the completion contains:

1. the last `<answer>...</answer>`, if no `\\boxed` comes after it;
2. the last `\\boxed{...}` or `\\fbox{...}` with closed braces. Boxes that are separated only by a comma, a semicolon,
   "and" or "or" form one list;
3. the text after the last `####`: a number or an expression up to the end of its line, or words that end the text;
4. the rest of the line after the last "answer is", "Answer:" or their Chinese forms;
5. the end of the completion, in which math-verify looks for the last expression.

Every pattern runs in time proportional to the text, because a model that repeats itself may write a megabyte.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Longer answers are not parsed, because parsing time grows with length.
MAX_CHARACTERS = 1000
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Braces, and escaped characters so that escaped braces are skipped.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# Text allowed between two boxes of one list. If neither a comma nor "and" nor "or" separates them, the last box
# replaces the earlier one.
_LIST_SEPARATOR = re.compile(
    r"(?:[\s$~]|\\[()\[\],;! ]|\\q?quad\b)*+(?:[,;]|\\text\{|(?=and\b|or\b))[\s$~,;&}\\()\[\]!]*+"
    r"(?:(?:and|or)\b)?[\s$~}\\()\[\],;!]*+"
)
_SEPARATORS = 60  # maximum number of characters between two boxes of one list
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_TAG_END = re.compile(r"</answer>", re.IGNORECASE)
# GSM8K's mark (####), followed by a number or an expression. A mark followed by words may be a Markdown heading. For
# linear time, `_MARKED` and `_MARKED_WORD` start only at the first # of a run. Both stop at the next mark.
# `_MARKED` also stops at the end of the line.
_MARKED = re.compile(r"(?<!#)#{4,}+\s*+(?![A-Za-z]{2}|####)(\S(?:[^\n#]|#(?!###))*+)")
# The mark followed by words and then the end of the text: an answer in words.
_MARKED_WORD = re.compile(r"(?<!#)#{4,}+\s*+([A-Za-z](?:[^\n:#]|#(?!###))*+)\Z")
_LEAD_IN = re.compile(r"(?:\banswers?[*_\s]*+(?:is\b|are\b|[:=：])|答案(?:是|为)?)[\s*_:=：]*+", re.IGNORECASE)
# The end of a sentence: a mark at the end of the text, or before white space and a capital letter, quote or bracket. So
# neither a decimal point nor "e.g. 3" ends a sentence.
_SENTENCE_END = re.compile(r"[。！？]|[.!?](?=\s+[A-Z\"'(]|\s*$)")


class StatedAnswer(NamedTuple):
    """Answer as a completion states it, before normalisation.

    Args:
        text: the answer; empty if there is none.
        marked: whether all of `text` is the answer. Otherwise the answer is the last expression in `text`.
        prose: the end of the completion, if the answer follows a phrase such as "the answer is"; else empty.
    """

    text: str
    marked: bool
    prose: str = ""


def extract_answer(text: str) -> StatedAnswer:
    """Return the answer that a completion states, by the rules in this module's docstring."""
    box, box_end = _boxes(text)
    tag, tag_end = _tagged(text)
    if tag is not None and tag_end > box_end:
        return extract_answer(tag) if box is not None and _BOX.search(tag) else StatedAnswer(tag.strip(), True)
    if box is not None:
        return StatedAnswer(box, True)
    marks = [*_MARKED.finditer(text), *_MARKED_WORD.finditer(text.rstrip())]
    if marks:
        return StatedAnswer(marks[-1][1].strip(), True)
    end = text.rstrip("# \n\t").strip()[-MAX_CHARACTERS:]  # drop a mark (####) at the very end
    line = _after_lead_in(end)
    return StatedAnswer(line, True, end) if line else StatedAnswer(end, False)


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` with closed braces, or None."""
    spans = _closed_boxes(text)
    return text[spans[-1][1] : spans[-1][2]].strip() if spans else None


def _closed_boxes(text: str) -> list[tuple[int, int, int]]:
    """Return (start of the command, start of the content, end of the content) of all closed boxes, sorted by start."""
    starts = {match.end() - 1: match.start() for match in _BOX.finditer(text)}
    if not starts:
        return []
    open_braces: list[int] = []
    spans: list[tuple[int, int, int]] = []
    for match in _BRACE.finditer(text, min(starts)):
        if match[0] == "{":
            open_braces.append(match.start())
        elif match[0] == "}" and open_braces:
            first = open_braces.pop()
            if first in starts:
                spans.append((starts[first], first + 1, match.start()))
    return sorted(spans)


def _boxes(text: str) -> tuple[str | None, int]:
    """Return the content of the last box, or of the list of boxes that it ends, and the position of its end."""
    spans = _closed_boxes(text)
    if not spans:
        return None, -1
    list_spans = [spans[-1]]
    for span in reversed(spans[:-1]):
        following = list_spans[-1][0]
        if span[2] + 1 > following or following - span[2] > _SEPARATORS:
            break
        if not _LIST_SEPARATOR.fullmatch(text, span[2] + 1, following) or len(list_spans) > MAX_CHARACTERS:
            break
        list_spans.append(span)
    contents = [text[start:end].strip() for _, start, end in reversed(list_spans)]
    joined = contents[-1] if len(set(contents)) == 1 else ", ".join(contents)
    return joined, list_spans[0][2]


def _tagged(text: str) -> tuple[str | None, int]:
    """Return the content of the last closed `<answer>`, and the position of its end."""
    ends = [match.start() for match in _TAG_END.finditer(text)]
    starts = [match.end() for match in _TAG.finditer(text)]
    if not ends or not starts or starts[0] > ends[-1]:
        return None, -1
    start = max(start for start in starts if start <= ends[-1])
    return text[start : ends[-1]], ends[-1]


def _after_lead_in(text: str) -> str:
    """Return the text after the last "answer is", up to the end of its sentence or line; empty without the phrase."""
    ends = [match.end() for match in _LEAD_IN.finditer(text)]
    if not ends:
        return ""
    line = text[ends[-1] :].split("\n", 1)[0]
    sentence_end = _SENTENCE_END.search(line)
    return line[: sentence_end.start() if sentence_end else None].strip()
