"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from sattle_dist.config import TrainConfig


def learning_rate(config: TrainConfig, epoch: int, step: int, num_steps: int) -> float:
    """Give the rate of step `step` of `epoch` (both from 0), for epochs of `num_steps` steps."""
    done = epoch + step / num_steps  # epochs, as a fraction
    if done < config.warmup_epochs:
        return config.learning_rate * (done + 1 / num_steps) / (config.warmup_epochs + 1 / num_steps)
    match config.schedule:
        case "constant":
            return config.learning_rate
        case "decay":  # the paper: a factor every two epochs
            return config.learning_rate * config.decay_factor ** (min(epoch, config.decay_until) // 2)
        case "cosine":
            share = (done - config.warmup_epochs) / max(config.epochs - config.warmup_epochs, 1e-9)
            return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    raise AssertionError(config.schedule)
