"""Tests of the verifier of mathematics: equal and different answers, and inputs that could take unbounded resources."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_scalerl.rollouts.grade import Grade, Outcome, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.verify.mathematics import (
    MAX_CHARACTERS,
    Mathematics,
    change_first_digit,
    extract_answer,
    last_boxed,
)
from lightning_scalerl.verify.pool import VerifierPool
from tests.examples import examples

# Limits on the CPU time and memory of one completion. The time is less than `verify.timeout_s` on an idle machine. It
# may exceed `cpu_s`, which does not count time in the kernel (allocating a gigabyte takes seconds).
BOUND_S, BOUND_MIB = 10.0, 2048.0


@dataclass(frozen=True)
class Measured:
    """Verifier that adds its CPU time and peak memory to the grade. CPU time does not depend on the machine's load."""

    verifier: Mathematics

    def grade(self, sample: Sample) -> Grade:
        began = time.process_time()
        grade = self.verifier.grade(sample)
        # Not `ru_maxrss`: after fork and exec it starts at the parent's peak, in tests the session's peak.
        status = Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        return replace(grade, parts={**grade.parts, "cpu_s": time.process_time() - began, "peak_mib": peak})


def sample(gold: str, text: str) -> Sample:
    return Sample(Prompt("p", "q", gold), text, text)


def graded(verifier: Mathematics, cases: Sequence[tuple[str, str]]) -> list[Outcome]:
    """Grade in a pool like a run's, with a longer timeout for a busy machine."""
    pool = VerifierPool(Measured(verifier), workers=2, timeout_s=60.0, retries=0, memory_gib=2.0)
    try:
        return [pool.wait(ticket) for ticket in [pool.submit(sample(*case)) for case in cases]]
    finally:
        pool.close()


def box(text: str) -> str:
    return f"\\boxed{{{text}}}"


@pytest.fixture(scope="module")
def verifier() -> Iterator[Mathematics]:
    """A verifier whose parser is built already, so that the first test is not slower than the others."""
    made = Mathematics(cpu_s=30.0)
    made.grade(sample("1/2", box("0.5")))
    yield made


def reward(verifier: Mathematics, gold: str, text: str) -> float | None:
    """Grade in this process, which works because pytest runs tests in the main thread."""
    return verifier.grade(sample(gold, text)).reward


# --- equal ---------------------------------------------------------------------------------------------------

EQUAL = [
    # Fractions and decimals.
    ("1/2", "\\frac{1}{2}"), ("\\frac12", "\\dfrac{1}{2}"), ("\\tfrac{3}{4}", "0.75"), ("1/2", "0.5"), (".5", "0.5"),
    ("\\frac{9}{19}", "9/19"), ("-\\frac{1}{2}", "\\frac{-1}{2}"), ("-\\frac12", "-0.5"), ("3\\frac{1}{2}", "3.5"),
    ("1.0", "1"), ("5.00", "5"), ("007", "7"), ("0", "-0"), ("0", "0.0"), ("-3", "-3.0"),
    # Thousands, percent, money, units.
    ("1,234", "1234"), ("1234567", "1,234,567"), ("1{,}234", "1234"), ("5", "5\\%"), ("5\\%", "5"), ("50", "50%"),
    ("18", "\\$18"), ("\\$5.50", "5.5"), ("18", "18\\text{ cm}"), ("18", "18\\,\\text{cm}"), ("90^\\circ", "90"),
    # Sets, intervals, matrices.
    ("\\{1,2,3\\}", "\\{3,2,1\\}"), ("1,2,3", "3,2,1"), ("(1,2)", "(1, 2)"), ("[1,2)", "[1, 2)"), ("\\pm 3", "3,-3"),
    ("(-\\infty,3]", "(-\\infty, 3]"), ("(0,1)\\cup(2,3)", "(2,3) \\cup (0,1)"), ("x \\in [0,1]", "[0,1]"),
    ("\\left(3,\\frac{\\pi}{2}\\right)", "(3,\\pi/2)"), ("1 \\text{ and } 2", "2,1"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1 & 2\\\\ 3 & 4\\end{bmatrix}"),
    # Expressions, equations, powers, bases, small numbers.
    ("x^2+2x+1", "(x+1)^2"), ("2\\sqrt{2}", "\\sqrt{8}"), ("\\sqrt{2}/2", "\\frac{1}{\\sqrt{2}}"), ("5", "x=5"),
    ("x=5", "5"), ("y=2x+3", "y = 3+2x"), ("3+4i", "4i+3"), ("10!", "3628800"), ("\\binom{5}{2}", "10"),
    ("2^{10}", "1024"), ("102_3", "102_{3}"), ("10^{-7}", "0.0000001"), ("2\\pi", "\\pi\\cdot 2"),
    ("42", "6\\cdot 7=42"), ("42", "x=6\\cdot 7=42"), ("125/3", "41.66667=125/3"), ("1010_2", "10=1010_2"),
    ("1", "7\\equiv 1"),
    # Words.
    ("\\text{(A)}", "A"), ("\\text{even}", "\\text{even}"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "stated"), EQUAL)
def test_equal_answers(verifier: Mathematics, gold: str, stated: str) -> None:
    assert reward(verifier, gold, box(stated)) == 1.0


DIFFERENT = [
    ("1/2", "1/3"), ("0.5", "0.05"), ("1", "-1"), ("-5", "5"), ("\\frac{2}{3}", "\\frac{3}{2}"), ("1/3", "0.33"),
    ("10^{-7}", "10^{-8}"), ("0.0000001", "0"), ("0", "0.0000001"), ("1000000", "1000001"), ("0.1", "0.10001"),
    ("123456789", "123456788"), ("1,234", "1.234"), ("1.5", "1,5"), ("12", "1{,}2"), ("1234", "1,234,0"),
    ("5\\%", "50\\%"), ("90^\\circ", "90\\pi"), ("\\sqrt2", "1.41"), ("\\pi", "3.14"), ("\\pi", "\\frac{22}{7}"),
    ("(1,2)", "(2,1)"), ("[1,2]", "(1,2)"), ("[1,2)", "[1,2]"), ("\\{1,2\\}", "\\{1,2,3\\}"), ("5", "\\{5,6\\}"),
    ("\\{1,2,3\\}", "\\{1,2\\}"), ("1,2", "1"), ("5", "5,6"), ("5", "5 or 6"), ("(0,1)\\cup(2,3)", "(0,1)\\cup(2,4)"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}"),
    ("102_3", "102_4"), ("102_3", "11"), ("x", "y"), ("x^2", "x^3"), ("x=5", "x=6"), ("x=5", "y=5"), ("x>3", "x<3"),
    ("x>3", "x\\ge 3"), ("3+4i", "3-4i"), ("10!", "10"), ("7", "7!"), ("12", "12^2"), ("2", "2x"), ("10", "10i"),
    ("\\infty", "-\\infty"), ("A", "B"), ("even", "odd"), ("\\text{even}", "\\text{odd}"), ("5", "\\text{five}"),
    ("42", "41=42"), ("42", "1+1=42"), ("42", "x=41=42"), ("42", "\\{41=42\\}"), ("x=42", "41=42"),
    ("5", ""), ("5", "x"), ("0.0000001", "0.0000002"), ("3\\times 10^{-8}", "0.00000004"), ("0.0000012", "0.0000013"),
    pytest.param("3 1/2", "31/2"),
    pytest.param("(1,2)", "\\{1,2\\}"),
    # From the MATH data set, exactly as written there.
    pytest.param("2007 + \\frac\\pi 2", "2"),
    pytest.param("\\frac \\pi4 + 2 - \\sqrt2", "2"),
    pytest.param("\\begin{pmatrix} -1 & 0 \\\\ 0 & -1 \\end{pmatrix}.", "-1"),
    pytest.param("\\begin{pmatrix} 1 & -1 \\\\ 1 & \\phantom -1 \\end{pmatrix}", "-1"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "stated"), DIFFERENT)
def test_different_answers(verifier: Mathematics, gold: str, stated: str) -> None:
    assert reward(verifier, gold, box(stated)) == 0.0


NUMBERS = st.one_of(
    st.integers(-(10**9), 10**9).map(str),
    st.tuples(st.integers(-999, 999), st.integers(1, 99)).map(lambda pair: f"\\frac{{{pair[0]}}}{{{pair[1]}}}"),
    st.tuples(st.integers(0, 999), st.integers(0, 99)).map(lambda pair: f"{pair[0]}.{pair[1]:02d}"),
)


@settings(max_examples=examples(60))
@given(NUMBERS)
def test_a_number_equals_itself_and_not_another(gold: str) -> None:
    verifier = Mathematics(cpu_s=30.0)
    right, wrong = verifier.known(gold)
    assert reward(verifier, gold, str(right)) == 1.0 and reward(verifier, gold, str(wrong)) == 0.0
    assert reward(verifier, gold, box(f"\\displaystyle {gold}")) == 1.0
    assert reward(verifier, gold, f"It is {box(gold)}, not {box(gold)[:-1]}") == 1.0


@pytest.mark.parametrize(
    ("answer", "other"),
    [
        ("72", "82"),
        ("9", "1"),
        ("0.5", "1.5"),
        ("x", "987654321"),
        ("\\frac{7}{8}", "\\frac{8}{8}"),
        ("f(1)=3", "f(1)=4"),
        ("7=x", "8=x"),
    ],
)
def test_changing_the_first_digit(answer: str, other: str) -> None:
    assert change_first_digit(answer) == other


@given(st.text(max_size=30))
def test_a_changed_answer_differs(answer: str) -> None:
    assert change_first_digit(answer) != answer or answer == "987654321"


# --- the stated answer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("\\boxed{41} no, \\boxed{42}", "42"),
        ("\\boxed{42} and \\boxed{41", "42"),
        ("\\boxed{\\frac{1}{\\sqrt{2}}}.", "\\frac{1}{\\sqrt{2}}"),
        ("\\boxed{\\{1, \\{2\\}\\}}", "\\{1, \\{2\\}\\}"),
        ("\\boxed{\\boxed{42}}", "42"),
        ("\\fbox{42}", "42"),
        ("\\boxed{}", ""),
        ("\\boxed{42} #### 41", "42"),
        ("6*7\n#### 42\nbye", "42"),
        ("#### 41\n#### 42", "42"),
        ("#### 41 #### 42", "42"),
        ("####\n42", "42"),
        ("####", None),
        ("It is 42 ####", "It is 42"),
        ("\\boxed {5}", "5"),
        ("\\boxed{3} first. Finally \\boxed {5}", "5"),
        ("#### $1,234", "$1,234"),
        ("#### x = 3", "x = 3"),
        ("#### 72 dollars", "72 dollars"),
        ("So yes.\n#### yes", "yes"),
        ("##### 42", "42"),
        ("#### yes\n#### no", "no"),
        ("#### C# or F#", "C# or F#"),
        # headings in Markdown
        ("#### Final Answer\n\nThe answer is 42.", "42"),
        ("#### Final Answer: 42", "42"),
        ("#### Step 4: sum\n20+22=42\n\n#### 42", "42"),
        ("42", "42"),
        ("", None),
        (" \n", None),
    ],
)
def test_the_stated_answer_is_extracted(text: str, expression: str | None) -> None:
    assert extract_answer(text)[0] == (expression or "")


@given(st.text("ab{}\\ ", max_size=12), st.text("xyz {}", max_size=20))
def test_the_last_closed_box_is_found(inside: str, around: str) -> None:
    """Text with balanced braces is extracted unchanged, regardless of the text around the box."""
    depth, balanced = 0, (len(inside) - len(inside.rstrip("\\"))) % 2 == 0
    for place, character in enumerate(inside):
        escaped = (len(inside[:place]) - len(inside[:place].rstrip("\\"))) % 2 == 1
        depth += {"{": 1, "}": -1}.get(character, 0) if not escaped else 0
        balanced = balanced and depth >= 0
    found = last_boxed(f"{around}\\boxed{{{inside}}}{around}")
    if balanced and depth == 0:
        assert found == inside.strip()


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        ("42", "reasoning\n#### 42", 1.0),
        ("1200", "#### 1,200", 1.0),
        ("42", "#### $42", 1.0),
        ("42", "#### 42 apples", 1.0),
        ("42", "#### forty two", 0.0),
        ("42", "#### 41\nso 42", 0.0),
        ("42", "\\boxed{42", 0.0),
        ("42", "####", 0.0),
        ("42", "", 0.0),
        ("42", "The answer is 42.", 1.0),
        ("42", "The answer is $42$.", 1.0),
        ("42", "So it is $x=42$", 1.0),
        ("42", "\\boxed{$42$}", 1.0),
        ("42", "\\boxed{\\text{42}}", 1.0),
        ("42", "\\boxed{42.}", 1.0),
        pytest.param("42", "41 then 42", 1.0),
        pytest.param("42", "42 is the answer", 1.0),
        pytest.param("42", "**42**", 1.0),
        pytest.param("18", "\\boxed{18 dollars}", 1.0),
    ],
)
def test_grades_of_whole_completions(verifier: Mathematics, gold: str, text: str, value: float) -> None:
    assert reward(verifier, gold, text) == value


def test_unstated_and_too_costly_answers_are_recorded(verifier: Mathematics) -> None:
    assert verifier.grade(sample("42", box("42"))).parts == {"math_unstated": 0.0}
    assert verifier.grade(sample("42", "####")).parts == {"math_unstated": 1.0}
    assert verifier.grade(sample("42", box("4" * (MAX_CHARACTERS + 1)))).parts == {"math_unstated": 1.0}
    assert Mathematics(cpu_s=0.05).grade(sample("42", box("10^{10^{10}}"))).parts["math_too_costly"] == 1.0


def test_an_answer_in_the_thinking_does_not_count(verifier: Mathematics) -> None:
    thought = Sample(Prompt("p", "q", "42"), f"{box('42')}</think>{box('41')}", box("41"))
    assert verifier.grade(thought).reward == 0.0
    assert verifier.grade(replace(thought, answer="")).reward == 0.0, "thinking has not ended"


@pytest.mark.slow
def test_a_gold_answer_that_cannot_be_read_is_an_error() -> None:
    for outcome in graded(Mathematics(), [(gold, box("42")) for gold in ("", " ")]):
        assert outcome.kind == "error" and "the gold answer is empty" in outcome.why


def test_grading_in_a_thread_is_an_error_with_a_remedy() -> None:
    import threading

    messages: list[str] = []

    def run() -> None:
        try:
            Mathematics().grade(sample("0.25", box("1/4")))
        except RuntimeError as error:
            messages.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert messages and "verify.workers" in messages[0]


# --- inputs that could take unbounded time or memory -----------------------------------------------------------

DEEP = {
    "braces": "{" * 400 + "1" + "}" * 400,
    "parentheses": "(" * 450 + "1" + ")" * 450,
    "open parentheses": "(" * 900,
    "brackets": "[" * 450 + "]" * 450,
    "roots": "\\sqrt{" * 120 + "2" + "}" * 120,
    "fractions": "\\frac{1}{" * 90 + "2" + "}" * 90,
    "absolutes": "|" * 900,
    "exponents": "x" + "^x" * 450,
    "indices": "x" + "_x" * 450,
    "minuses": "-" * 900 + "1",
    "sines": "\\sin(\\cos(\\tan(" * 40 + "x" + ")))" * 40,
}
BIG = {
    "nines": "9^9^9^9",
    "braced nines": "9^{9^{9^9}}",
    "ten to ten to ten": "10^{10^{10}}",
    "its inverse": "10^{-10^{10}}",
    "a tower of twos": "2^{2^{2^{2^{2^{2^{2}}}}}}",
    "a tower of e": "e^{e^{e^{e^{e}}}}",
    "factorials": "((10!)!)!",
    "more factorials": "9!!!!!!!",
    "a factorial": "99999999!",
    "a binomial": "\\binom{10^9}{5\\cdot 10^8}",
    "a fraction's power": "(\\frac{3}{2})^{100000000}",
    "a decimal's power": "1.5^{1000000000}",
    "a huge root": "\\sqrt[1000000000]{2}",
    "an exponent of a float": "1e1000000000",
    "a sine": "\\sin(10^{10^{10}})",
    "a logarithm": "\\log_{10}(10^{10^{10}})",
    "a remainder": "7^{7^{7^{7}}} \\mod 10",
    "a greatest divisor": "\\gcd(10^{10^9}, 3)",
    "a floor": "\\lfloor 10^{10^{10}} \\rfloor",
    "a sum": "\\sum_{n=1}^{10^{10}} n^n",
    "a harmonic sum": "\\sum_{n=1}^{1000000} \\frac{1}{n}",
    "a product": "\\prod_{n=1}^{1000000} n",
    "an integral": "\\int_0^{10^{100}} e^{x^{x^x}} dx",
    "another integral": "\\int_0^1 \\sin(x^x) \\cos(e^x) dx",
    "a limit": "\\lim_{x\\to 0} \\frac{\\sin(x^{100})}{x^{100}}",
    "a polynomial": "(1+x)^{10000000}",
    "a polynomial of three": "(x+y+z)^{500}",
    "a matrix's power": "\\begin{pmatrix}1&1\\\\1&0\\end{pmatrix}^{1000000000}",
}
LONG = {
    "digits": box("7" * 990),
    "more digits than an answer": box("7" * 10**6),
    "digits without a box": "7" * 10**6,
    "digits behind the mark": "#### " + "7" * 10**6,
    "decimals": box("0." + "7" * 990),
    "a set": box("\\{" + ",".join(map(str, range(250))) + "\\}"),
    "a tuple of powers": box("(" + ",".join(f"x^{{{n}}}" for n in range(100)) + ")"),
    "a megabyte of prose": "so it is " * 110_000,
    "a megabyte in a box": box("x+" * 500_000 + "1"),
    "many boxes": box("1") * 100_000,
    "one deep box": "\\boxed{" * 100 + "1" + "}" * 100,
    "null bytes": "\x00" * 10**6,
    "a null byte": box("4\x002"),
    "Arabic digits": box("٤٣"),
    "wide digits": box("４３"),
    "half a surrogate": box("\ud800"),
    "dollars": box("$" * 990),
    "backslashes": box("\\" * 990),
    "units": box("5 " + "\\text{cm}" * 100),
}
EXPLOSIVE = {**{name: box(text) for name, text in {**DEEP, **BIG}.items()}, **LONG}
# The worst inputs of each kind, for the daily tests.
SOME = ["braced nines", "ten to ten to ten", "factorials", "a sum", "parentheses", "many boxes", "null bytes"]


def check_bounded(names: Sequence[str], cpu_s: float) -> None:
    outcomes = graded(Mathematics(cpu_s=cpu_s), [("42", EXPLOSIVE[name]) for name in names])
    for name, outcome in zip(names, outcomes, strict=True):
        assert (outcome.kind, outcome.reward) == ("score", 0.0), (name, outcome)
        assert outcome.parts["cpu_s"] < BOUND_S and outcome.parts["peak_mib"] < BOUND_MIB, (name, outcome)


@pytest.mark.slow
def test_some_explosive_answers_are_wrong_in_bounded_time_and_memory() -> None:
    check_bounded(SOME, cpu_s=0.3)


@pytest.mark.full
def test_all_explosive_answers_are_wrong_in_bounded_time_and_memory() -> None:
    check_bounded(list(EXPLOSIVE), cpu_s=Mathematics().cpu_s)


def test_unclosed_boxes_take_linear_time() -> None:
    """A model that repeats itself writes these; in quadratic time 20,000 tokens take half a minute despite `cpu_s`."""
    began = time.process_time()
    assert last_boxed("\\boxed{" * 1000) is None
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize("text", ["#" * 100_000 + "\n", "#" * 100_000 + "ab:", "####ab" * 10_000 + ":"])
def test_marks_without_an_answer_take_linear_time(text: str) -> None:
    began = time.process_time()
    assert not extract_answer(text)[1]
    assert time.process_time() - began < 0.5


def test_extracting_the_answer_counts_towards_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(text: str) -> tuple[str, bool]:
        until = time.process_time() + 2.0
        while time.process_time() < until:
            pass
        return "42", True

    monkeypatch.setattr("lightning_scalerl.verify.mathematics.extract_answer", slow)
    assert Mathematics(cpu_s=0.05).grade(sample("42", "42")).parts["math_too_costly"] == 1.0


@pytest.mark.slow
def test_an_explosive_gold_answer_is_an_error_or_compared_as_text() -> None:
    """Text is compared if the parser gives up by itself; it is an error if the parser must be stopped."""
    pool = VerifierPool(Mathematics(), workers=1, timeout_s=60.0, retries=0, memory_gib=2.0)
    try:
        gold = "\\frac{1}{" * 90 + "2" + "}" * 90
        outcome = pool.wait(pool.submit(sample(gold, box("1"))))
    finally:
        pool.close()
    stopped = outcome.kind == "error" and "the gold answer" in outcome.why
    assert stopped or (outcome.kind, outcome.reward) == ("score", 0.0)


# --- generated -----------------------------------------------------------------------------------------------

GOLDS = ["42", "\\frac{7}{8}", "(1,2)", "\\{1,2,3\\}", "x^2+1", "\\sqrt{2}", "\\text{even}", "0.125", "[0,\\infty)"]
PIECES = (
    *"0123456789xyzn+-*/^_(){}[]|!,.=<>%&'\"~ \n\t\x00",
    *("\\frac", "\\sqrt", "\\boxed{", "\\text{", "\\sum_{", "\\int", "\\binom", "\\begin{pmatrix}", "\\end{pmatrix}"),
    *("\\\\", "\\infty", "\\pi", "\\cdot", "\\left(", "\\right)", "\\log", "\\sin", "\\pm", "\\%", "\\$", "$", "####"),
    *(
        "10^{10}",
        "9^9",
        "1000!",
        "e^",
        "\\cup",
        "\\in",
        " and ",
        " or ",
        "The answer is ",
        "٣",
        "é",
        "²",
        "½",
        "−",
        "∞",
    ),
)


def generated(count: int, seed: int) -> list[tuple[str, str]]:
    """Texts and gold answers. Half of the texts are random pieces, the others are answers with random edits."""
    source = random.Random(seed)
    drawn = []
    for number in range(count):
        if number % 2:
            text = "".join(source.choices(PIECES, k=source.randint(0, 25)))
        else:
            text = source.choice(GOLDS)
            for _ in range(source.randint(0, 3)):
                place = source.randint(0, len(text))
                text = text[:place] + source.choice(PIECES) + text[place + source.randint(0, 1) :]
        drawn.append((source.choice(GOLDS), box(text) if source.random() < 0.8 else text))
    return drawn


def check_generated(count: int, cpu_s: float) -> None:
    cases = generated(count, seed=11)
    outcomes = graded(Mathematics(cpu_s=cpu_s), cases)
    for drawn_pair, outcome in zip(cases, outcomes, strict=True):
        assert outcome.kind == "score" and outcome.reward in (0.0, 1.0), (drawn_pair, outcome)
        assert outcome.parts["cpu_s"] < BOUND_S and outcome.parts["peak_mib"] < BOUND_MIB, (drawn_pair, outcome)
    assert 0 < sum(outcome.reward for outcome in outcomes) < count / 2


@pytest.mark.full
def test_hundreds_of_generated_texts_get_a_grade() -> None:
    check_generated(300, cpu_s=1.0)


@pytest.mark.full
def test_ten_thousand_generated_texts_get_a_grade() -> None:
    check_generated(10_000, cpu_s=Mathematics().cpu_s)


@pytest.mark.parametrize(
    ("gold", "stated", "expected"),
    [
        # a single letter is not a unit
        ("2 i", "\\boxed{2}", 0.0),
        ("2 i", "\\boxed{2i}", 1.0),
        ("2i", "\\boxed{2 i}", 1.0),
        ("3 x", "\\boxed{3}", 0.0),
        ("3 x", "\\boxed{3 y}", 0.0),
        ("3x", "\\boxed{3 x}", 1.0),
        ("18", "\\boxed{18 dollars}", 1.0),
        ("18 dollars", "\\boxed{18}", 1.0),
        # headings are not marks of an answer
        ("42", "#### Final Answer\n\nThe answer is 42.", 1.0),
        ("42", "#### Final Answer: 42", 1.0),
        ("42", "#### Step 4: sum\n20+22=42\n\n**Answer: 42**", 1.0),
        ("42", "#### Final Answer\n\nThe answer is 41.", 0.0),
        ("yes", "So:\n#### yes", 1.0),
    ],
)
def test_variables_and_headings(gold: str, stated: str, expected: float) -> None:
    assert reward(Mathematics(cpu_s=30.0), gold, stated) == expected


def test_equal_wrong_answers_have_equal_texts() -> None:
    """Majority votes compare these texts, so mathematically equal answers must have the same one."""
    prompt, verifier = Prompt(prompt_id="1", text="?", answer="7"), Mathematics()
    verifier.prepare()

    def answer(text: str) -> str | None:
        grade = verifier.grade(Sample(prompt, text, text))
        assert grade.reward == 0.0
        return grade.answer

    for equal in (
        (r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{\frac12}", "The answer is 0.50"),
        (r"\boxed{x+1}", r"\boxed{1+x}"),
        (r"\boxed{\text{Monday}}", r"\boxed{monday}"),
    ):
        assert len({answer(text) for text in equal}) == 1
    different = (r"\boxed{12\text{ cm}}", r"\boxed{12\text{ m}}", r"\boxed{12.1}", r"\boxed{(1,2)}", r"\boxed{\{1,2\}}")
    assert len({answer(text) for text in different}) == len(different)
    assert answer("") == "" and verifier.grade(Sample(prompt, r"\boxed{7.0}", r"\boxed{7.0}")).answer is None
