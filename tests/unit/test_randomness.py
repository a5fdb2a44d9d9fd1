"""Random choices are functions of their place: bijections, slices, and numbers that look random."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sattle_dist.randomness import ROWS, WEIGHTS, MaskSpec, Permutation, draw_masks, normal_rows

CPU = torch.device("cpu")


def test_permutation_is_a_bijection() -> None:
    for n in [*range(1, 300), 1023, 1024, 1025, 70_000]:
        assert np.array_equal(np.sort(Permutation(n, 3, n)(np.arange(n))), np.arange(n)), n


def test_permutation_does_not_depend_on_what_is_asked() -> None:
    order = Permutation(1000, 0, 5)
    whole = order(np.arange(1000))
    assert np.array_equal(order(np.array([999, 3, 500])), whole[[999, 3, 500]])


def test_permutation_looks_random() -> None:
    """Over many keys each item comes to each place equally often, and neighbours do not stay neighbours."""
    n, keys = 20, 4000
    places = np.stack([Permutation(n, 0, key)(np.arange(n)) for key in range(keys)])  # [keys, n]
    counts = np.stack([np.bincount(places[:, place], minlength=n) for place in range(n)])
    expected = keys / n
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    degrees = (n - 1) ** 2  # 361: standard deviation about 27
    assert abs(chi_squared - degrees) < 6 * np.sqrt(2 * degrees)
    follows = (np.diff(places, axis=1) == 1).mean()
    assert abs(follows - 1 / n) < 0.01
    long = Permutation(100_000, 1, 1)(np.arange(100_000))
    assert abs(np.corrcoef(long[:-1], long[1:])[0, 1]) < 0.02


def test_epochs_and_seeds_differ() -> None:
    one = Permutation(1000, 0, 0)(np.arange(1000))
    assert (one == Permutation(1000, 0, 1)(np.arange(1000))).mean() < 0.02
    assert (one == Permutation(1000, 1, 0)(np.arange(1000))).mean() < 0.02


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (5, 12), (11, 12), (3, 3)])
def test_masks_of_a_slice_are_the_slice_of_the_masks(start: int, stop: int) -> None:
    specs = {"a": MaskSpec((2, 7), 0.4), "b": MaskSpec((3,), 0.1)}
    whole = draw_masks(specs, 0, 12, 1, 2, 3, device=CPU)
    part = draw_masks(specs, start, stop, 1, 2, 3, device=CPU)
    for name in specs:
        assert torch.equal(part[name], whole[name][start:stop])


def test_masks_have_their_rate_and_mean_one() -> None:
    specs = {"a": MaskSpec((100,), 0.3), "b": MaskSpec((100,), 0.1)}
    masks = draw_masks(specs, 0, 5000, 7, device=CPU)
    for name, spec in specs.items():
        zero = (masks[name] == 0).float()
        assert abs(zero.mean() - spec.rate) < 0.004
        assert abs(masks[name].mean() - 1) < 0.006
    both = torch.corrcoef(torch.stack([masks["a"].flatten(), masks["b"].flatten()]))[0, 1]
    assert abs(both) < 0.01
    other_step = draw_masks(specs, 0, 5000, 8, device=CPU)
    assert not torch.equal(masks["a"], other_step["a"])


def test_rows_depend_on_their_place_alone() -> None:
    whole = normal_rows(0, 3000, 3, 0.5, ROWS, 11)
    for start, stop in ((0, 1), (1023, 1025), (1024, 2048), (2999, 3000), (7, 7)):
        assert torch.equal(normal_rows(start, stop, 3, 0.5, ROWS, 11), whole[start:stop])
    assert abs(whole.mean()) < 0.02
    assert abs(whole.std() - 0.5) < 0.01
    assert not torch.equal(normal_rows(0, 3, 3, 0.5, ROWS, 12), whole[:3])
    for seed in range(6):  # no seed makes two uses share numbers
        assert not torch.equal(normal_rows(0, 3, 3, 1.0, ROWS, seed), normal_rows(0, 3, 3, 1.0, WEIGHTS, seed))
