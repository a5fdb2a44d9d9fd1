"""The learning rate at hand-computed steps."""

from __future__ import annotations

import dataclasses
import math

import pytest

from sattle_dist.config import TrainConfig
from sattle_dist.schedule import learning_rate

BASE = TrainConfig(learning_rate=0.1, epochs=11, warmup_epochs=0.0)


def test_paper_decay() -> None:
    """A factor per two epochs, until an epoch."""
    config = dataclasses.replace(BASE, schedule="decay", decay_factor=0.5, decay_until=6)
    rates = [learning_rate(config, epoch, 3, 10) for epoch in range(10)]
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125, 0.0125, 0.0125])


def test_cosine_after_warmup() -> None:
    config = dataclasses.replace(BASE, schedule="cosine", warmup_epochs=1.0)
    assert learning_rate(config, 0, 0, 4) == pytest.approx(0.1 * 1 / 5)
    assert learning_rate(config, 0, 3, 4) == pytest.approx(0.1 * 4 / 5)
    assert learning_rate(config, 1, 0, 4) == pytest.approx(0.1)
    assert learning_rate(config, 6, 0, 4) == pytest.approx(0.05)
    assert learning_rate(config, 3, 2, 4) == pytest.approx(0.05 * (1 + math.cos(math.pi / 4)))
    assert 0 < learning_rate(config, 10, 3, 4) < 0.001


def test_constant() -> None:
    config = dataclasses.replace(BASE, schedule="constant")
    assert {learning_rate(config, epoch, 0, 4) for epoch in range(20)} == {0.1}
