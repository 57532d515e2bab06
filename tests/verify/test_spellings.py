"""Tests of the verifier of mathematics on other spellings of the same answer, and on changed answers, by kind."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.verify.answers import extract_answer
from lightning_scalerl.verify.mathematics import Mathematics
from lightning_scalerl.verify.spelling import normalise
from lightning_scalerl.verify.words import agree, separate_words

# (gold answer, completion) by kind: all pairs of SAME must score 1, all of OTHER must score 0.
SAME = {
    "words": [
        ("5 \\text{ hours}", "\\boxed{5 \\text{ hrs}}"), ("5 \\text{ hours}", "\\boxed{5}"),
        ("4 \\text{ cm}^2", "\\boxed{4 \\text{ square centimeters}}"),
        ("4 \\text{ cm}^2", "\\boxed{4\\,\\mathrm{cm}^{2}}"), ("3 \\text{ meters}", "\\boxed{3 \\text{ m}}"),
        ("3 \\text{ meters}", "\\boxed{3 \\text{ metres}}"), ("\\text{Yes}", "\\boxed{yes}"),
        ("\\text{yes}", "\\boxed{\\textbf{Yes}}"), ("7 \\text{ dollars}", "\\boxed{\\$7}"),
        ("\\text{Monday}", "\\boxed{Monday}"), ("1 \\text{ inch}", "\\boxed{1 \\text{ inches}}"),
        ("10 \\text{ a.m.}", "\\boxed{10 \\text{ AM}}"), ("10 \\text{ p.m.}", "\\boxed{10\\text{ pm}}"),
        ("3 \\text{ apples}", "\\boxed{3 \\text{ apple}}"), ("\\text{the red one}", "\\boxed{\\text{red one}}"),
        ("6 \\text{ units}", "\\boxed{6 \\text{ cm}}"), ("x=1 \\text{ or } x=2", "\\boxed{x=2 \\text{ or } x=1}"),
        ("\\text{(B)}", "\\boxed{B}"), ("\\text{(B)}", "\\boxed{(B)}"),
        ("12 \\text{ million}", "\\boxed{12{,}000{,}000}"),
        ("60 \\text{ miles per hour}", "\\boxed{60 \\text{ mph}}"), ("25\\%", "\\boxed{25 \\text{ percent}}"),
        ("n \\text{ odd}", "\\boxed{\\text{odd } n}"),
        ("20^\\circ \\text{C}", "\\boxed{20 \\text{ degrees Celsius}}"), ("8", "\\boxed{\\text{The answer is } 8}"),
        ("8", "\\boxed{x=\\text{8}}"), ("A,C", "\\boxed{\\text{A,C}}"), ("\\text{blue}", "\\boxed{blue}"),
    ],
    "thousands": [
        ("1000", "\\boxed{1\\,000}"), ("10000", "\\boxed{10 000}"), ("1{,}000x", "\\boxed{1000x}"),
        ("1,000,000", "\\boxed{10^6}"), ("\\frac{1,000}{3}", "\\boxed{\\frac{1000}{3}}"),
        ("1234.5", "\\boxed{1,234.5}"), ("(1000,2000)", "\\boxed{(1{,}000, 2{,}000)}"),
        ("12345", "\\boxed{12{,}345}"), ("1~000", "\\boxed{1000}"), ("(100,200)", "\\boxed{(100, 200)}"),
        ("100, 200", "\\boxed{100,200}"), ("2,\\!000\\pi", "\\boxed{2000\\pi}"),
        ("12,\\! 111,\\! 100", "\\boxed{12111100}"), ("x=2,\\!000", "\\boxed{2000}"),
        ("1,500 \\text{ and } 2,600", "\\boxed{1500 \\text{ and } 2600}"),
    ],
    "boxes": [
        ("1, 2", "\\boxed{1} and \\boxed{2}"), ("(1,2)", "So \\boxed{(1,2)}."),
        ("3", "$\\boxed{3}$ or in words: \\boxed{3}"), ("2, -2", "$\\boxed{2}$, $\\boxed{-2}$"),
        ("9", "Wait, \\boxed{8} is wrong. The answer is \\boxed{9}."), ("\\text{A, C}", "\\boxed{A}, \\boxed{C}"),
        ("x=3, y=4", "\\boxed{x=3}, \\boxed{y=4}"),
    ],
    "style": [
        ("7", "\\boxed{\\mathbf{7}}"), ("7", "\\boxed{\\textbf{7}}"), ("x+1", "\\boxed{\\displaystyle x+1}"),
        ("\\frac{1}{2}", "\\boxed{\\textstyle\\frac12}"), ("7", "\\boxed{\\underline{7}}"),
        ("7", "\\boxed{{\\color{red}7}}"), ("7", "\\boxed{\\color{red}{7}}"), ("[1,2)", "\\boxed{\\([1,2)\\)}"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\boxed{\\(\\begin{pmatrix}1\\\\2\\end{pmatrix}\\)}"),
        ("7", "\\boxed{\\text{Answer: }7}"), ("7", "\\boxed{\\text{Final answer: } 7}"),
        ("7", "\\boxed{\\quad 7 \\quad}"), ("7", "\\boxed{\\;7\\;}"),
        ("\\{1,2\\}", "\\boxed{\\left\\lbrace 1, 2 \\right\\rbrace}"), ("7", "\\boxed{\\huge{7}}"),
        ("7", "\\boxed{\\mathrm{7}}"), ("7", "\\boxed{\\ensuremath{7}}"),
        ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\boxed{\\bm{\\begin{pmatrix}1&2\\end{pmatrix}}}"),
        ("(3,4)", "\\boxed{\\bigl(3,4\\bigr)}"), ("7", "\\boxed{7\\checkmark}"), ("8", "\\boxed{\\[8\\]}"),
        ("8", "\\boxed{8\\ }"), ("8", "\\boxed{~8~}"), ("8", "\\boxed{\\bf 8}"),
        ("8", "\\boxed{\\textcolor{blue}{8}}"), ("8", "\\boxed{\\large 8}"),
        ("(-\\infty,3]", "\\boxed{\\boldsymbol{(-\\infty,3]}}"),
    ],
    "upright": [
        ("\\ln 2", "\\boxed{\\operatorname{ln} 2}"), ("\\ln 2", "\\boxed{\\mathrm{ln}\\,2}"),
        ("\\log 3", "\\boxed{\\text{log } 3}"), ("2\\pi i", "\\boxed{2\\pi\\mathrm{i}}"),
        ("e^{i\\pi/3}", "\\boxed{\\mathrm{e}^{\\mathrm{i}\\pi/3}}"), ("\\cos 1", "\\boxed{\\mathrm{cos}\\,1}"),
        ("3e", "\\boxed{3\\mathrm{e}}"), ("\\arctan 2", "\\boxed{\\operatorname{arctan} 2}"),
    ],
    "unicode": [
        ("\\frac{1}{2}", "\\boxed{½}"), ("\\frac{5}{2}", "\\boxed{2½}"), ("\\infty", "\\boxed{∞}"),
        ("(-\\infty,3]", "\\boxed{(−∞, 3]}"), ("2\\pi", "\\boxed{2π}"), ("x\\le 3", "\\boxed{x ≤ 3}"),
        ("90^\\circ", "\\boxed{90°}"), ("6", "\\boxed{2·3}"), ("-\\frac{1}{2}", "\\boxed{−½}"),
        ("\\sqrt{x+1}", "\\boxed{√(x+1)}"), ("x^{-1}", "\\boxed{x⁻¹}"), ("\\sqrt[3]{2}", "\\boxed{∛2}"),
        ("7", "\\boxed{７}"), ("\\pm 2", "\\boxed{±2}"), ("3", "\\boxed{6÷2}"),
        ("[0,1)\\cup(2,3)", "\\boxed{[0,1)∪(2,3)}"), ("a_1", "\\boxed{a₁}"), ("2^{10}", "\\boxed{2¹⁰}"),
        ("10-3", "\\boxed{10−3}"), ("\\theta", "\\boxed{θ}"),
    ],
    "prose": [
        ("42", "So the answer is **42**."), ("42", "The final answer is: $42$"), ("42", "Answer: \"42\""),
        ("42", "The answer is '42'."), ("\\frac{1}{2}", "The answer is \\(\\frac{1}{2}\\)."),
        ("42", "Final answer: 42 dollars."), ("[1,2]", "The answer is $[1,2]$."), ("42", "<answer> 42 </answer>"),
        ("42", "<answer>$42$</answer>"), ("42", "<answer>41</answer> no <answer>42</answer>"),
        ("x^2+1", "The answer is x^2+1."), ("42", "最终答案：42"), ("42", "The answer: 42"),
        ("1234", "The answer is 1,234."), ("-5", "Therefore the answer is -5"), ("42", "ANSWER: 42"),
        ("42", "The answer is [42]."), ("0.5", "The answer is .5"),
        ("42", "\\boxed{41} was wrong. <answer>42</answer>"), ("1, 2", "The answers are 1 and 2."),
        ("\\text{B}", "The answer is (B)."), ("\\text{yes}", "The answer is yes."), ("2, 3", "Answer: 2, 3"),
    ],
    "periodic": [
        ("\\frac13", "\\boxed{0.\\overline{3}}"), ("\\frac{4}{11}", "\\boxed{0.\\overline{36}}"),
        ("0.\\overline{3}", "\\boxed{1/3}"), ("1.2\\overline{5}", "\\boxed{\\frac{113}{90}}"),
        ("0.\\bar{6}", "\\boxed{\\frac23}"), ("\\frac{1}{3}", "\\boxed{0.\\dot{3}}"),
        ("1", "\\boxed{0.\\overline{9}}"),
    ],
    "misc": [
        ("60", "\\boxed{60^{\\circ}}"), ("60^\\circ", "\\boxed{60\\text{ degrees}}"), ("60^\\circ", "\\boxed{60°}"),
        ("5", "\\boxed{+5}"), ("xy", "\\boxed{yx}"), ("3\\frac12", "\\boxed{3 \\frac{1}{2}}"),
        ("A", "\\boxed{\\mathrm{A}}"), ("\\frac{\\pi}{2}", "\\boxed{\\dfrac{\\pi}{2}\\text{ radians}}"),
    ],
}  # fmt: skip

OTHER = {
    "words": [
        ("5 \\text{ hours}", "\\boxed{5 \\text{ minutes}}"), ("4 \\text{ cm}^2", "\\boxed{4 \\text{ cm}^3}"),
        ("3 \\text{ m}", "\\boxed{3 \\text{ km}}"), ("x=1 \\text{ and } x=2", "\\boxed{x=1 \\text{ or } x=2}"),
        ("\\text{increasing}", "\\boxed{\\text{decreasing}}"),
        ("n \\text{ is prime}", "\\boxed{n \\text{ is not prime}}"),
        ("7 \\text{ dollars}", "\\boxed{7 \\text{ cents}}"), ("\\$7", "\\boxed{7 \\text{ euros}}"),
        ("20^\\circ \\text{C}", "\\boxed{20^\\circ \\text{F}}"), ("3 \\text{ kg}", "\\boxed{3 \\text{ grams}}"),
        ("\\text{Monday}", "\\boxed{\\text{Tuesday}}"), ("\\text{at least } 5", "\\boxed{\\text{at most } 5}"),
        ("12 \\text{ million}", "\\boxed{12 \\text{ billion}}"), ("60 \\text{ mph}", "\\boxed{60 \\text{ km/h}}"),
        ("5 \\text{ square feet}", "\\boxed{5 \\text{ cubic feet}}"), ("\\text{even}", "\\boxed{\\text{odd}}"),
        ("\\text{true}", "\\boxed{\\text{false}}"),
        ("a \\text{ divides } b", "\\boxed{a \\text{ does not divide } b}"),
        ("a > 3 \\text{ and } b < 2", "\\boxed{a > 3 \\text{ or } b < 2}"),
        ("9 \\text{ a.m.}", "\\boxed{9 \\text{ p.m.}}"), ("n \\text{ odd}", "\\boxed{n \\text{ even}}"),
        ("f \\text{ increasing}", "\\boxed{f \\text{ decreasing}}"),
    ],
    "thousands": [
        ("1,2", "\\boxed{12}"), ("(1,234)", "\\boxed{(1,2,3,4)}"), ("12,345,6", "\\boxed{123456}"),
        ("1000", "\\boxed{1,00,0}"), ("(100,200)", "\\boxed{100200}"),
    ],
    "boxes": [
        ("5", "\\boxed{5}, \\boxed{6}"), ("5", "\\boxed{5} no, \\boxed{6}"), ("2, 3", "\\boxed{2}, \\boxed{4}"),
        ("7", "\\boxed{7}. Wait, \\boxed{8}"),
    ],
    "upright": [
        ("e^2", "\\boxed{\\mathrm{e}^3}"), ("2+3i", "\\boxed{2-3\\mathrm{i}}"),
        ("\\sin 1", "\\boxed{\\operatorname{cos} 1}"),
    ],
    "unicode": [
        ("\\sqrt{3}", "\\boxed{√2}"), ("x^2", "\\boxed{x³}"), ("-3", "\\boxed{3}"), ("½", "\\boxed{⅓}"),
        ("90^\\circ", "\\boxed{80°}"), ("\\infty", "\\boxed{−∞}"),
    ],
    "prose": [
        ("42", "The answer is not 41. <answer>41</answer>"), ("42", "<answer>41</answer> 42"),
        ("42", "The answer is 41."), ("(3,4)", "So the answer is (4, 3)."), ("42", "Answer: −42"), ("42", "答案：41"),
        ("42", "<answer></answer>"), ("42", "The answer is 4/2."), ("\\text{B}", "The answer is (C)."),
        ("\\text{yes}", "The answer is no."),
    ],
    "periodic": [
        ("0.\\overline{3}", "\\boxed{0.3}"), ("0.1\\overline{6}", "\\boxed{0.\\overline{16}}"),
        ("0.\\overline{36}", "\\boxed{0.36}"), ("\\frac13", "\\boxed{0.\\overline{4}}"),
    ],
    "misc": [
        ("ab", "\\boxed{ba^2}"), ("AB", "\\boxed{CD}"), ("x^2", "\\boxed{2x}"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def verifier() -> Iterator[Mathematics]:
    warmed = Mathematics(cpu_s=30.0)
    warmed.prepare()
    yield warmed


def wrongly_graded(verifier: Mathematics, pairs: list[tuple[str, str]], reward: float) -> list[tuple[str, str]]:
    return [
        (gold, text)
        for gold, text in pairs
        if verifier.grade(Sample(Prompt("p", "q", gold), text, text)).reward != reward
    ]


@pytest.mark.parametrize("kind", SAME)
def test_other_spellings_are_right(verifier: Mathematics, kind: str) -> None:
    assert not wrongly_graded(verifier, SAME[kind], 1.0)


@pytest.mark.parametrize("kind", OTHER)
def test_changed_answers_are_wrong(verifier: Mathematics, kind: str) -> None:
    assert not wrongly_graded(verifier, OTHER[kind], 0.0)


def test_grades_below_math_verifys_have_a_reason(
    verifier: Mathematics,
) -> None:
    """We grade 0 where math-verify grades 1 only if words differ, or if the completion marks an answer.

    math-verify ignores words after an expression, and uses its last expression even after a marked answer.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    below = set()
    for kinds, reward in ((SAME, 1.0), (OTHER, 0.0)):
        for gold, text in (pair for pairs in kinds.values() for pair in pairs):
            theirs = verify(
                parse(f"${gold}$", parsing_timeout=None), parse(text, parsing_timeout=None), timeout_seconds=None
            )
            if theirs and not reward:
                below.add((gold, text))
    assert len(below) > 10, "there must be enough such pairs to test"
    for gold, text in below:
        words = separate_words(normalise(gold)).words, separate_words(normalise(extract_answer(text).text)).words
        assert not agree(*words) or "<answer>" in text, (gold, text)


def test_normalising_twice_changes_nothing() -> None:
    """Gold and stated answers may have been normalised before, and must still compare equal."""
    for gold, text in (pair for kinds in (SAME, OTHER) for pairs in kinds.values() for pair in pairs):
        for answer in (gold, extract_answer(text).text):
            assert normalise(normalise(answer)) == normalise(answer), answer
