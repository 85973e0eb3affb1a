"""Statistics of an evaluation: pass@k, intervals that respect prompts, and the comparison of two models.

Responses to one prompt resemble each other, so prompts are the units: an interval from responses alone is too narrow.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

LEVEL = 0.95  # of intervals
_PERMUTATIONS = 10_000


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Return the probability that one of k responses is right, when `num_right` of `num_samples` were.

    1 - C(n - c, k) / C(n, k), the estimator without bias (Chen et al., arXiv:2107.03374, equation 1).
    """
    if not 0 < k <= num_samples:
        raise ValueError(f"pass@{k} needs {k} samples or more, and there are {num_samples}")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def reported_ks(num_samples: int) -> list[int]:
    """Return the k of the pass@k that are reported: powers of two from 2 on, and the number of samples."""
    powers = [1 << power for power in range(1, num_samples.bit_length())]
    return sorted({k for k in (*powers, num_samples) if 1 < k <= num_samples})


def t_quantile(degrees: float) -> float:
    """Return how many standard errors a two-sided interval reaches: the quantile of Student's t, by its expansion in
    1 / degrees to the third order (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def interval_of_share(total: float, squares: float, count: float) -> tuple[float, float]:
    """Return the interval of a share whose `count` prompts have means with this sum and sum of squares.

    Wilson's interval for as many independent responses as have the standard error that is seen between prompts (Korn
    and Graubard, Survey Methodology 24, 1998): it stays within 0 and 1, and does not shrink to a point at either.
    """
    if count < 2:
        return math.nan, math.nan
    share = min(1.0, max(0.0, total / count))
    variance = max(0.0, squares / count - share * share) / (count - 1)  # of the mean
    independent = share * (1 - share) / variance if variance > 1e-15 else count
    z = t_quantile(count - 1)
    shrunk = z * z / independent
    middle = (share + shrunk / 2) / (1 + shrunk)
    reach = z * math.sqrt(share * (1 - share) / independent + shrunk / (4 * independent)) / (1 + shrunk)
    low, high = max(0.0, middle - reach), min(1.0, middle + reach)
    return (low if share > 0.0 else 0.0), (high if share < 1.0 else 1.0)  # where rounding would leave a trace


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The mean difference of two models over the same prompts."""

    mean: float
    low: float
    high: float
    p_value: float  # that the signs of the prompts' differences are chance


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> PairedDifference:
    """Compare the means of the same prompts, in the same order. The p-value is that of a test which flips signs."""
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    if len(differences) < 2:
        raise ValueError("two prompts or more are needed")
    mean = fmean(differences)
    reach = t_quantile(len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    moved = [difference for difference in differences if difference]
    chance, observed = random.Random(0), abs(math.fsum(moved)) - 1e-12
    extreme = sum(
        abs(math.fsum(value if chance.getrandbits(1) else -value for value in moved)) >= observed
        for _ in range(_PERMUTATIONS)
    )
    return PairedDifference(mean, mean - reach, mean + reach, (extreme + 1) / (_PERMUTATIONS + 1))


WINDOW = 13  # words (Brown et al., arXiv:2005.14165, appendix C)


def overlapping(questions: Sequence[str], trained: Iterable[str]) -> set[int]:
    """Return the places of the questions that occur in training data: with the same words, or with a run of 13 words
    that a text of it has too. Case, punctuation and white space do not count."""
    windows: dict[tuple[str, ...], set[int]] = {}
    for place, question in enumerate(questions):
        for window in _windows(question):
            windows.setdefault(window, set()).add(place)
    found: set[int] = set()
    for text in trained:
        for window in _windows(text):
            found |= windows.get(window, set())
    return found


def _windows(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the runs of words of a text; all its words where there are fewer."""
    words = re.findall(r"\w+", text.casefold())
    for start in range(max(1, len(words) - WINDOW + 1)):
        yield tuple(words[start : start + WINDOW])
