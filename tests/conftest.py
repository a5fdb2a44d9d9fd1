"""Fixtures of all tests."""

from __future__ import annotations

import torch

# The suite shares few cores between many processes; more threads only get in each other's way.
torch.set_num_threads(1)
