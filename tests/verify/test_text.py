"""Tests of verifiers of words: SQuAD's normalization and F1, letters of choices, true and false answers."""

from __future__ import annotations

import random
import string
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_scalerl.rollouts.grade import Grade, Grader, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.verify.grade_once import attempt
from lightning_scalerl.verify.text import (
    Choice,
    ExactMatch,
    QuestionAnswer,
    TruthfulAnswer,
    chosen_letter,
    f1,
    final_answer,
    normalize,
)

WORDS = st.lists(st.sampled_from(["cat", "sat", "mat", "hat", "blue", "42"]), max_size=6).map(" ".join)


def graded(grader: Grader, answer: Any, text: str) -> Grade:
    return grader.grade(Sample(Prompt("p", "q", answer), text, text))


# --- normalization and F1 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The Eiffel Tower.", "eiffel tower"),
        ("an  apple, a day", "apple day"),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("twenty-one", "twentyone"),
        ("  A\tB\nC ", "b c"),
        ("$1,000", "1000"),
        ("", ""),
        ("The", ""),
        ("Straße", "straße"),
    ],
)
def test_normalization_is_that_of_squad(text: str, bare: str) -> None:
    assert normalize(text) == bare


@given(st.text(max_size=40))
def test_normalized_texts_have_no_case_no_punctuation_and_single_spaces(text: str) -> None:
    bare = normalize(text)
    assert not set(bare) & set(string.punctuation)
    assert bare == " ".join(bare.split()) and not set(bare.split()) & {"a", "an", "the"}
    assert normalize(f" {text}\n") == bare


@pytest.mark.parametrize(
    ("prediction", "gold", "value"),
    [
        ("the cat sat", "cat sat", 1.0),
        ("cat", "cat sat", 2 / 3),
        ("cat cat", "cat", 2 / 3),
        ("cat sat mat", "hat", 0.0),
        ("", "", 1.0),
        ("", "cat", 0.0),
        ("The", "a", 1.0),
    ],
)
def test_f1(prediction: str, gold: str, value: float) -> None:
    assert f1(prediction, gold) == pytest.approx(value)


@given(WORDS, WORDS)
def test_f1_is_symmetric_and_bounded_and_ignores_word_order(one: str, two: str) -> None:
    value = f1(one, two)
    assert value == pytest.approx(f1(two, one)) and 0.0 <= value <= 1.0
    assert (value == 1.0) == (Counter(one.split()) == Counter(two.split()))
    assert value == pytest.approx(f1(" ".join(reversed(one.split())), two.upper()))
    shared = sum((Counter(one.split()) & Counter(two.split())).values())
    if one and two:
        assert value == pytest.approx(2 * shared / (len(one.split()) + len(two.split())))


# --- final answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is Paris.", "Paris."),
        ("I think.\nAnswer: 14 May", "14 May"),
        ("The answer is Rome.\nWait. The final answer: Paris", "Paris"),
        pytest.param("The answer is Rome. No, the answer is Paris", "Paris"),
        pytest.param("The answer is: Paris", "Paris"),
        ("Paris", "Paris"),
        ("It is hard.\nParis\n\n", "Paris"),
        ("FINAL ANSWER: paris\nas I said", "paris"),
        ("", ""),
        (" \n ", ""),
    ],
)
def test_the_final_answer_is_extracted(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@given(
    WORDS.filter(bool), st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\r"), max_size=30)
)
def test_text_before_the_answer_does_not_matter(gold: str, before: str) -> None:
    grade = graded(QuestionAnswer(), [gold], f"{before}\nThe answer is {gold}")
    assert (grade.reward, grade.parts["f1"], grade.correct) == (1.0, 1.0, True)


def test_a_match_with_one_of_several_answers_is_enough() -> None:
    golds = ["14 May 2071", "May 14, 2071"]
    assert graded(QuestionAnswer(), golds, "The answer is may 14 2071.").reward == 1.0
    near = graded(QuestionAnswer(), golds, "The answer is May 2071")
    assert near.reward == 0.0 and near.parts["f1"] == pytest.approx(0.8) and near.correct is False
    partial = graded(QuestionAnswer(partial=True), golds, "The answer is May 2071")
    assert partial.reward == pytest.approx(0.8) and partial.correct is False
    assert graded(QuestionAnswer(), "14 May 2071", "14 may 2071").reward == 1.0
    assert graded(QuestionAnswer(), [], "anything").reward == 0.0


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("4", " 4\n", 1.0),
        (4, "4", 1.0),
        (["4", "four"], "four", 1.0),
        ("four", "Four", 0.0),
        ("4", "4.", 0.0),
        ("", "", 1.0),
        ("4", "", 0.0),
    ],
)
def test_exact_match(answer: Any, text: str, reward: float) -> None:
    assert graded(ExactMatch(), answer, text).reward == reward


# --- choices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (C).", "C"),
        ("The answer is C", "C"),
        ("the correct answer is: **C**.", "C"),
        ("Answer: C) honey", "C"),
        ("answer: (c)", "C"),
        ("I choose option D.", "D"),
        ("Final choice: B", "B"),
        ("\\boxed{C}", "C"),
        ("\\boxed{(C)}", "C"),
        ("\\boxed{\\text{C}}", "C"),
        ("The answer is A. No! The answer is (B).", "B"),
        ("The answer is A, so \\boxed{D}", "D"),
        ("A is too cold, B too warm. It is C", "C"),
        ("(B)", "B"),
        ("B", "B"),
        ("B.", "B"),
        ("C) honey", "C"),
        ("It's obvious.", None),
        ("honey", None),
        ("", None),
        ("42", None),
        ("DNA", None),
        # remarks about other options do not count
        ("The answer is (B). Option A is wrong because it is cold, and option D too.", "B"),
        ("The correct answer is **B**.\n\n- Option A: no.\n- Option D: no.", "B"),
        ("**Answer: (B)** - choice (C) fails", "B"),
        ("The correct answer choice is B. Option C is not.", "B"),
        ("Option A is cold, so I take option B", "B"),
        ("\\boxed{A) Vitamin C}", "A"),
        ("\\boxed{A. honey}", "A"),
        ("\\boxed{(A): honey}", "A"),
        pytest.param("B, I think.", "B"),
        pytest.param("The answer is a metal, which is (C).", "C"),
    ],
)
def test_the_chosen_letter_is_extracted(text: str, letter: str | None) -> None:
    assert chosen_letter(text) == letter


@given(st.sampled_from("ABCDE"), st.sampled_from("ABCDE"))
def test_a_choice_is_right_or_wrong(answer: str, chosen: str) -> None:
    for form in ("The answer is ({}).", "\\boxed{{{}}}", "{}"):
        assert graded(Choice(), answer, form.format(chosen)).reward == float(answer == chosen)


@given(st.sampled_from("ABCDE"))
def test_examples_of_choice_are_graded_as_known(answer: str) -> None:
    right, wrong = Choice().known(answer)
    assert graded(Choice(), answer, str(right)).reward == 1.0 and graded(Choice(), answer, str(wrong)).reward == 0.0


# --- true and false ------------------------------------------------------------------------------------------

CAVE = {
    "true": ["You hear an echo", "Nothing bad happens"],
    "false": ["A dragon wakes up", "The cave collapses at once"],
}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("You hear an echo.", 1.0),
        ("Well.\nThe answer is: nothing bad happens to you", 1.0),
        ("A dragon wakes up and you hear it", 0.0),
        ("The cave collapses", 0.0),
        ("I have no comment", 0.0),
        ("", 0.0),
    ],
)
def test_a_text_is_right_if_it_is_nearer_to_a_true_answer(text: str, reward: float) -> None:
    grade = graded(TruthfulAnswer(), CAVE, text)
    assert grade.reward == reward
    assert (grade.parts["f1_true"] > grade.parts["f1_false"]) == bool(reward)


def test_a_truthful_answer_needs_no_false_answers() -> None:
    answer = {"true": ["yes"], "false": []}
    right, wrong = TruthfulAnswer().known(answer)
    assert graded(TruthfulAnswer(), answer, str(right)).reward == 1.0
    assert graded(TruthfulAnswer(), answer, str(wrong)).reward == 0.0


# --- ten thousand inputs -------------------------------------------------------------------------------------

PIECES = (
    *("The answer is", "answer:", "Final answer", "option", "choice", "\\boxed{", "\\text{", "}", "(", ")", "{", "**"),
    *("A", "B", "I", "a", "the", "an", "cat", "42", "-1", ".", ":", ",", "'", " ", "  ", "\n", "\r\n", "\t", "\x00"),
    *("é", "٣", "\U0001f600", "\u2028", "\u202e", "\ufeff", "ß", "İ", "\\", "$", "<think>", "</think>"),
)
GRADERS: list[tuple[Grader, Any]] = [
    (ExactMatch(), ["cat", "42"]),
    (Choice(), "B"),
    (QuestionAnswer(), ["the cat", "42"]),
    (QuestionAnswer(partial=True), ["the cat", "42"]),
    (TruthfulAnswer(), {"true": ["a cat"], "false": ["no cat"]}),
]


@pytest.mark.parametrize(("grader", "answer"), GRADERS, ids=lambda parameter: type(parameter).__name__)
def test_ten_thousand_texts_get_a_grade(grader: Grader, answer: Any) -> None:
    source = random.Random(7)
    slowest = 0.0
    for _ in range(10_000):
        text = "".join(source.choices(PIECES, k=source.randint(0, 30)))
        outcome = attempt(grader, Sample(Prompt("p", "q", answer), text, text))
        assert outcome.kind == "score" and 0.0 <= outcome.reward <= 1.0, (text, outcome)
        slowest = max(slowest, outcome.seconds)
    assert slowest < 1.0


@pytest.mark.parametrize(("grader", "answer"), GRADERS, ids=lambda parameter: type(parameter).__name__)
@pytest.mark.parametrize(
    "piece", ["answer is ", "\\boxed{", " ", "A ", "a", "(", ":*", "\n", "answer", "\\boxed{\\text{"]
)
def test_long_texts_take_linear_time(grader: Grader, answer: Any, piece: str) -> None:
    """These verifiers run in the trainer's process, where no timeout can stop them."""
    text = piece * (200_000 // len(piece))
    began = time.process_time()
    assert attempt(grader, Sample(Prompt("p", "q", answer), text, text)).kind == "score"
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("text", ["answer" + " " * 500 + ".", "The choice" + "\n" * 500, "\\boxed{" + " " * 8000])
def test_spaces_do_not_make_choices_slow(text: str) -> None:
    """A model may end with thousands of line feeds; with cubic time this would block the run."""
    began = time.process_time()
    assert chosen_letter(text) is None
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize(
    ("verifier", "texts"),
    [
        (Choice(), {"The answer is (B).": "B", "(B)": "B", "I do not know.": ""}),
        (QuestionAnswer(), {"The answer is the  Nile.": "nile", "answer: Nile": "nile", "": ""}),
        (ExactMatch(), {" a b ": "a b", "": ""}),
    ],
)
def test_equal_wrong_answers_have_equal_texts(verifier: Grader, texts: dict[str, str]) -> None:
    prompt = Prompt(prompt_id="1", text="?", answer="C")
    for text, answer in texts.items():
        outcome = attempt(verifier, Sample(prompt, text, text))
        assert (outcome.reward, outcome.answer) == (0.0, answer)
