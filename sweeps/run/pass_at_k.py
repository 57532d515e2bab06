"""Compute pass@k and maj@k of an evaluation from n completions per prompt, with their standard errors.

pass@k is the probability that at least one of k completions passes (Chen et al. 2021, arXiv 2107.03374, equation 1).
maj@k is the probability that the most frequent answer among k completions is right; ties are broken at random (Wang et
al. 2022, arXiv 2203.11171). For each prompt, both are computed in closed form as the mean over all subsets of k graded
completions, so they are unbiased. Then they are averaged over prompts. pass@1 is the pass rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, sqrt


@dataclass(frozen=True)
class Votes:
    """Answers of a prompt's graded completions.

    Attributes:
        right: number of completions that passed.
        wrong: number of completions for each different wrong answer.
        silent: number of completions without an answer. They do not vote; if no completion votes, maj@k counts as
            wrong.
    """

    right: int
    wrong: tuple[int, ...] = ()
    silent: int = 0

    @property
    def graded(self) -> int:
        """Number of graded completions."""
        return self.right + sum(self.wrong) + self.silent

    def without_one(self) -> Mapping[Votes, int]:
        """Leave out each completion in turn, for the jackknife.

        Returns:
            The different votes that result, each with the number of completions whose removal results in it.
        """
        remaining: dict[Votes, int] = {}
        if self.right:
            remaining[Votes(self.right - 1, self.wrong, self.silent)] = self.right
        for count in set(self.wrong):
            index = self.wrong.index(count)
            fewer = (*self.wrong[:index], count - 1, *self.wrong[index + 1 :])
            remaining[Votes(self.right, fewer, self.silent)] = count * self.wrong.count(count)
        if self.silent:
            remaining[Votes(self.right, self.wrong, self.silent - 1)] = self.silent
        return remaining


def sizes(samples: int) -> list[int]:
    """Return the k for which pass@k is recorded: 2, 4, 8, ... up to the number of completions per prompt."""
    return [2**power for power in range(1, samples.bit_length()) if 2**power <= samples]


@lru_cache(maxsize=65536)
def pass_at_k(votes: Votes, k: int) -> float:
    """Return the fraction of subsets of k completions in which at least one passes: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - comb(votes.graded - votes.right, k) / comb(votes.graded, k)


@lru_cache(maxsize=65536)
def maj_at_k(votes: Votes, k: int) -> float:
    """Return the fraction of subsets of k completions whose most frequent answer is right; m tied answers count 1/m."""
    favourable = 0.0
    for right in range(1, min(votes.right, k) + 1):
        # `right` of the k completions are right. Count the ways to choose the others. The key has the number of
        # completions chosen so far, and the number of wrong answers that occur as often as the right answer.
        ways = {(chosen, 0): comb(votes.silent, chosen) for chosen in range(min(votes.silent, k - right) + 1)}
        for count in votes.wrong:
            extended: dict[tuple[int, int], int] = {}
            for (chosen, tied), number in ways.items():
                for count_chosen in range(min(count, right, k - right - chosen) + 1):
                    key = chosen + count_chosen, tied + (count_chosen == right)
                    extended[key] = extended.get(key, 0) + number * comb(count, count_chosen)
            ways = extended
        weighted_ways = sum(number / (1 + tied) for (chosen, tied), number in ways.items() if chosen == k - right)
        favourable += comb(votes.right, right) * weighted_ways
    return favourable / comb(votes.graded, k)


Statistic = Callable[[Votes, int], float]
STATISTICS: Mapping[str, Statistic] = {"pass": pass_at_k, "maj": maj_at_k}


def mean_at_k(statistic: Statistic, prompts: Sequence[Votes], k: int) -> tuple[float, float] | None:
    """Return the mean of a statistic over prompts and its standard error; None if no prompt has k graded completions.

    Prompts with fewer than k graded completions are left out. Like that of the pass rate, the standard error covers the
    sampling of completions, not of prompts. It is computed from the jackknife variance over each prompt's completions.
    At k = n the jackknife is undefined, so its value at k - 1 is used. If no prompt varies, one success and one failure
    are added to the whole set, so that the standard error is never zero.
    """
    counted = [votes for votes in prompts if votes.graded >= k]
    if not counted:
        return None
    mean = sum(statistic(votes, k) for votes in counted) / len(counted)
    variance = sum(_jackknife(statistic, votes, min(k, votes.graded - 1)) for votes in counted)
    if variance <= 0:
        trials = sum(votes.graded // k for votes in counted)
        smooth = (mean * trials + 1) / (trials + 2)
        return mean, sqrt(smooth * (1 - smooth) / trials)
    return mean, sqrt(variance) / len(counted)


@lru_cache(maxsize=65536)
def _jackknife(statistic: Statistic, votes: Votes, k: int) -> float:
    """Return the jackknife estimate of a statistic's variance over the completions of one prompt; 0 for k < 1."""
    n = votes.graded
    if k < 1:
        return 0.0
    full = statistic(votes, k)
    return (
        (n - 1)
        / n
        * sum(count * (statistic(remaining, k) - full) ** 2 for remaining, count in votes.without_one().items())
    )


def all_at_k(samples: int, prompts: Sequence[Votes], answers: bool) -> dict[str, tuple[float, float]]:
    """Return pass@k and, with `answers`, maj@k: pairs of mean and standard error, by name (such as `pass@2`).

    Args:
        samples: number of completions per prompt.
        prompts: votes of each prompt.
        answers: whether the votes distinguish wrong answers, as maj@k requires.
    """
    results = {
        f"{name}@{k}": mean_at_k(STATISTICS[name], prompts, k)
        for k in sizes(samples)
        for name in (("pass", "maj") if answers else ("pass",))
    }
    return {name: result for name, result in results.items() if result is not None}
