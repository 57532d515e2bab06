"""pass@k and maj@k of an evaluation, from n completions per prompt, with their standard errors.

pass@k is the probability that at least one of k completions passes (Chen et al. 2021, arXiv 2107.03374, equation 1);
maj@k is the probability that the most frequent answer among k completions is right, where a tie is decided by lot
(Wang et al. 2022, arXiv 2203.11171). Both are means over all subsets of k of a prompt's graded completions, in closed
form, so they are unbiased, and then means over prompts. pass@1 is the pass rate.
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
        silent: number of completions without an answer. They do not vote; without any vote, the majority is wrong.
    """

    right: int
    wrong: tuple[int, ...] = ()
    silent: int = 0

    @property
    def graded(self) -> int:
        """Number of graded completions."""
        return self.right + sum(self.wrong) + self.silent

    def without_one(self) -> Mapping[Votes, int]:
        """Map the votes without one completion to the number of completions whose removal gives these votes."""
        left: dict[Votes, int] = {}
        if self.right:
            left[Votes(self.right - 1, self.wrong, self.silent)] = self.right
        for count in set(self.wrong):
            at = self.wrong.index(count)
            fewer = (*self.wrong[:at], count - 1, *self.wrong[at + 1 :])
            left[Votes(self.right, fewer, self.silent)] = count * self.wrong.count(count)
        if self.silent:
            left[Votes(self.right, self.wrong, self.silent - 1)] = self.silent
        return left


def sizes(samples: int) -> list[int]:
    """Return the k at which an evaluation with this many completions per prompt is recorded: 2, 4, 8, ..."""
    return [2**power for power in range(1, samples.bit_length()) if 2**power <= samples]


@lru_cache(maxsize=65536)
def pass_at_k(votes: Votes, k: int) -> float:
    """Return the share of subsets of k completions in which one passes: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - comb(votes.graded - votes.right, k) / comb(votes.graded, k)


@lru_cache(maxsize=65536)
def maj_at_k(votes: Votes, k: int) -> float:
    """Return the share of subsets of k completions whose most frequent answer is right; a tie of m counts 1/m."""
    favourable = 0.0
    for right in range(1, min(votes.right, k) + 1):
        # Ways to choose the others by (completions chosen, wrong answers that occur as often as the right one).
        ways = {(chosen, 0): comb(votes.silent, chosen) for chosen in range(min(votes.silent, k - right) + 1)}
        for count in votes.wrong:
            longer: dict[tuple[int, int], int] = {}
            for (chosen, tied), number in ways.items():
                for more in range(min(count, right, k - right - chosen) + 1):
                    key = chosen + more, tied + (more == right)
                    longer[key] = longer.get(key, 0) + number * comb(count, more)
            ways = longer
        share = sum(number / (1 + tied) for (chosen, tied), number in ways.items() if chosen == k - right)
        favourable += comb(votes.right, right) * share
    return favourable / comb(votes.graded, k)


Statistic = Callable[[Votes, int], float]
STATISTICS: Mapping[str, Statistic] = {"pass": pass_at_k, "maj": maj_at_k}


def mean_at_k(statistic: Statistic, prompts: Sequence[Votes], k: int) -> tuple[float, float] | None:
    """Return the mean over prompts and its standard error; None if no prompt has k graded completions.

    Prompts with fewer than k graded completions do not count. The standard error covers sampling only, for this fixed
    set of prompts, like that of the pass rate: the jackknife over a prompt's completions, summed over prompts. At k = n
    the jackknife does not exist, and the one at k - 1 is used. If no prompt varies, the standard error is computed with
    one success and one failure added to the whole set, so that it is never zero.
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
    """Return the jackknife's estimate of the variance of a statistic over the completions of one prompt."""
    n = votes.graded
    if k < 1:
        return 0.0
    whole = statistic(votes, k)
    return (n - 1) / n * sum(many * (statistic(left, k) - whole) ** 2 for left, many in votes.without_one().items())


def all_at_k(samples: int, prompts: Sequence[Votes], answers: bool) -> dict[str, tuple[float, float]]:
    """Return pass@k and, if answers are known, maj@k, each with its standard error, by name such as `pass@2`.

    Args:
        samples: completions per prompt.
        prompts: the votes by prompt.
        answers: whether the votes distinguish wrong answers, which maj@k needs.
    """
    results = {
        f"{name}@{k}": mean_at_k(STATISTICS[name], prompts, k)
        for k in sizes(samples)
        for name in (("pass", "maj") if answers else ("pass",))
    }
    return {name: result for name, result in results.items() if result is not None}
