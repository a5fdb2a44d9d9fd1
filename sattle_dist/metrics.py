"""Metrics of positions: each defined once, here and in docs/evaluation.md, for any grouping, with confidence intervals.

    count          (query, target) pairs
    mrr            mean of 1 / position
    mean_position  mean of position
    amri           1 - (mean position - 1) / (mean of (candidates - 1) / 2): 1 if every position is 1, 0 at chance,
                   below 0 if worse; the number of candidates is each pair's own
    hits@k         share of pairs with position at most k

All are quotients of sums over pairs, so a table of sums by group gives the metrics of every union of groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sattle_dist.graph import Int64s
from sattle_dist.randomness import BOOTSTRAP, philox

HITS = (1, 3, 5, 10)
NUM_SUMS = 4 + len(HITS)  # count, 1 / position, position, candidates, hits
AT_ONCE = 1 << 20  # pairs, or triples, whose terms are in memory

Floats = npt.NDArray[np.float64]
Metrics = dict[str, float]
"""The metrics above by name; {"count": 0} of nothing."""


def metrics(position: Floats, candidates: Int64s | None = None) -> Metrics:
    """Give the metrics of positions [pairs], none of nothing; amri only where the numbers of candidates are given."""
    if not len(position):
        return {}
    given = np.zeros(len(position), np.int64) if candidates is None else candidates
    found = metrics_of(sum_by_group(position, given, np.zeros(len(position), np.int64), 1)[0])
    if candidates is None:
        del found["amri"]
    return found


def sum_by_group(position: Floats, candidates: Int64s, group: Int64s, num_groups: int) -> Floats:
    """Sum the terms of the metrics over the pairs of each group: [num_groups, NUM_SUMS]."""
    sums = np.zeros((num_groups, NUM_SUMS))
    for part in pieces(len(position)):
        terms = terms_of(position[part], candidates[part])
        for column in range(NUM_SUMS):
            sums[:, column] += np.bincount(group[part], terms[:, column], minlength=num_groups)
    return sums


def terms_of(position: Floats, candidates: Int64s) -> Floats:
    """Give what each pair adds to the sums: [pairs, NUM_SUMS]."""
    hits = [position <= k for k in HITS]
    return np.stack([np.ones_like(position), 1 / position, position, candidates, *hits], axis=1)


def metrics_of(sums: Floats) -> Metrics:
    """Turn sums [NUM_SUMS] into metrics."""
    count, reciprocal, position, candidates, *hits = sums.tolist()
    if count == 0:
        return {"count": 0}
    by_chance = (candidates - count) / 2
    return {
        "count": round(count),
        "mrr": reciprocal / count,
        "mean_position": position / count,
        # A target without rivals is first by chance too: no better, no worse.
        "amri": 1 - (position - count) / by_chance if by_chance > 0 else 0.0,
        **{f"hits@{k}": hit / count for k, hit in zip(HITS, hits, strict=True)},
    }


def bootstrap(
    position: Floats, candidates: Int64s, triples: Int64s, num_resamples: int, seed: int
) -> dict[str, list[float]]:
    """Give the 95% interval of every metric, by resampling triples with replacement.

    triples [n, 2] names the two pairs of each triple, one a direction: they are drawn together, as they are not
    independent. Each resample cuts its n draws among pieces of the triples by the multinomial law, then draws within
    each piece: memory is bounded by a piece, and the law is that of n draws from all.
    """
    rng = np.random.Generator(philox(BOOTSTRAP, seed))
    parts = list(pieces(len(triples)))
    shares = np.array([part.stop - part.start for part in parts]) / len(triples)
    draws = rng.multinomial(len(triples), shares, size=num_resamples)  # [resamples, parts]
    sums = np.zeros((num_resamples, NUM_SUMS))
    for i, part in enumerate(parts):
        one, other = triples[part].T
        terms = terms_of(position[one], candidates[one]) + terms_of(position[other], candidates[other])
        for resample in range(num_resamples):
            drawn = rng.integers(len(terms), size=draws[resample, i])
            sums[resample] += np.bincount(drawn, minlength=len(terms)) @ terms
    found = [metrics_of(row) for row in sums]
    names = [name for name in found[0] if name != "count"]
    return {name: np.quantile([m[name] for m in found], [0.025, 0.975]).tolist() for name in names}


def pieces(length: int) -> Iterator[slice]:
    """Cut [0, length) into pieces that are worked on at once."""
    return (slice(start, min(start + AT_ONCE, length)) for start in range(0, length, AT_ONCE))
