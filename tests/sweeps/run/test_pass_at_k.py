"""Tests of pass@k and maj@k: closed forms against means over all subsets, errors against simulated evaluations."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.run.pass_at_k import Votes, all_at_k, maj_at_k, mean_at_k, pass_at_k, sizes

# A prompt's graded completions: 0 is the right answer, 1 to 3 are wrong answers, None is no answer.
COMPLETIONS = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, None]), min_size=1, max_size=8)


def votes_of(completions: list[int | None]) -> Votes:
    counts = Counter(completions)
    wrong = tuple(count for answer, count in counts.most_common() if answer not in (0, None))
    return Votes(counts[0], wrong, counts[None])


def majority(answers: tuple[int | None, ...]) -> float:
    """Return the probability that the most frequent answer is right; a tie is broken at random."""
    counts = Counter(answer for answer in answers if answer is not None)
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    return (0 in first) / len(first) if first else 0.0


@settings(max_examples=150, deadline=None)
@given(COMPLETIONS, st.data())
def test_the_closed_forms_are_means_over_all_subsets(completions: list[int | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(completions)))
    subsets = list(combinations(completions, k))
    votes = votes_of(completions)
    assert pass_at_k(votes, k) == pytest.approx(sum(0 in subset for subset in subsets) / len(subsets), abs=1e-12)
    assert maj_at_k(votes, k) == pytest.approx(sum(map(majority, subsets)) / len(subsets), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(COMPLETIONS, min_size=1, max_size=5), st.sampled_from([1, 2, 4]))
def test_prompts_with_too_few_graded_completions_do_not_count(prompts: list[list[int | None]], k: int) -> None:
    """Abstentions leave unequal numbers of completions; the mean is over the prompts that have k."""
    counted = [prompt for prompt in prompts if len(prompt) >= k]
    result = mean_at_k(pass_at_k, [votes_of(prompt) for prompt in prompts], k)
    if not counted:
        assert result is None
        return
    by_prompt = [np.mean([0 in subset for subset in combinations(prompt, k)]) for prompt in counted]
    assert result is not None and result[0] == pytest.approx(np.mean(by_prompt), abs=1e-12) and result[1] > 0


def test_at_k_1_the_standard_error_is_that_of_the_pass_rate() -> None:
    passed, n = [0, 1, 3, 4], 4
    rates = np.array(passed) / n
    mean, error = mean_at_k(pass_at_k, [Votes(count, (), n - count) for count in passed], 1) or (0, 0)
    assert mean == pytest.approx(rates.mean())
    assert error == pytest.approx(sqrt((rates * (1 - rates)).sum() / (n - 1)) / len(passed))


@pytest.mark.parametrize("k", [2, 4, 8])
def test_standard_errors_match_repeated_evaluations(k: int) -> None:
    """The spread of 400 simulated evaluations (64 prompts, 8 completions each) must match the reported errors."""
    random = np.random.default_rng(5)
    rates = random.beta(0.6, 1.2, 64)
    results = []
    for _ in range(400):
        passed = random.binomial(8, rates)
        results.append(mean_at_k(pass_at_k, [Votes(int(count), (), 8 - int(count)) for count in passed], k))
    means, errors = np.array(results, dtype=float).T
    expected = (1 - (1 - rates) ** k).mean()
    assert means.mean() == pytest.approx(expected, abs=3 * means.std() / 20)
    assert sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.25)


def test_a_tie_is_broken_at_random() -> None:
    assert maj_at_k(Votes(2, (2,)), 4) == pytest.approx(1 / 2)
    assert maj_at_k(Votes(1, (1, 1)), 3) == pytest.approx(1 / 3)
    assert maj_at_k(Votes(1, (), 3), 4) == 1.0  # completions without an answer do not vote
    assert maj_at_k(Votes(0, (), 4), 4) == 0.0


def test_k_is_a_power_of_two_up_to_the_number_of_samples() -> None:
    assert sizes(1) == [] and sizes(4) == [2, 4] and sizes(30) == [2, 4, 8, 16]
    prompts = [Votes(1, (2,), 1), Votes(4)]
    known = all_at_k(4, prompts, answers=True)
    assert set(known) == {"pass@2", "maj@2", "pass@4", "maj@4"}
    assert known["pass@4"][0] == 1.0 and known["maj@4"][0] == 0.5 and all(error > 0 for _, error in known.values())
    assert set(all_at_k(4, prompts, answers=False)) == {"pass@2", "pass@4"}
