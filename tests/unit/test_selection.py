"""Which epoch is best, and when training stops."""

from __future__ import annotations

from typing import Any

import pytest

from sattle_dist.selection import best_record, is_exhausted


def history(*mrrs: float | None) -> list[dict[str, Any]]:
    """Epochs with these validation MRRs; None was not evaluated."""
    return [{"epoch": i, **({} if mrr is None else {"valid": {"mrr": mrr}})} for i, mrr in enumerate(mrrs, 1)]


@pytest.mark.parametrize(
    ("mrrs", "best"),
    [
        ((), None),
        ((None, None), None),
        ((0.1, 0.3, 0.2), 2),
        ((0.1, 0.3, 0.3), 2),  # no better is no news
        ((None, 0.1, None, 0.2, None), 4),
    ],
)
def test_the_first_of_the_highest_is_best(mrrs: tuple[float | None, ...], best: int | None) -> None:
    record = best_record(history(*mrrs))
    assert (record["epoch"] if record else None) == best


def test_a_split_without_triples_selects_nothing() -> None:
    assert best_record([{"epoch": 1, "valid": {}}, {"epoch": 2, "valid": {"count": 0}}]) is None


@pytest.mark.parametrize(
    ("mrrs", "patience", "stops"),
    [
        ((0.3, 0.2, 0.1), 0, False),
        ((0.3, 0.2), 2, False),
        ((0.3, 0.2, 0.1), 2, True),
        ((0.3, None, 0.2, None), 2, False),  # evaluations count, not epochs
        ((0.3, None, 0.3, None, 0.3), 2, True),
        ((0.3, 0.2, 0.4), 1, False),
        ((None, None), 1, False),
    ],
)
def test_patience_counts_evaluations_since_the_best(mrrs: tuple[float | None, ...], patience: int, stops: bool) -> None:
    assert is_exhausted(history(*mrrs), patience) is stops
