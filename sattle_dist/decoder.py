"""The decoders: how encoded tokens become one query vector, to be multiplied with every entity's row.

Shapes: B queries, D dim, T tokens read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sattle_dist.encoder import RELATION, SOURCE, WeightedBatchNorm


class TwoMult(nn.Module):
    """The encoded relation token is the query vector (or the source token, the paper's ablation)."""

    last_norm = True

    def __init__(self, token: int) -> None:
        super().__init__()
        self.reads = (token,)

    def reset(self, generator: torch.Generator) -> None:
        """Do nothing: there are no parameters."""

    def forward(self, encoded: Tensor, query_weight: Tensor) -> Tensor:
        """Turn encoded [B, 1, D] into query vectors [B, D]."""
        return encoded[:, 0]


class Tucker(nn.Module):
    """A core tensor contracted with the encoded relation and the batch-normed encoded source."""

    last_norm = False
    reads = (SOURCE, RELATION)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_source = WeightedBatchNorm(dim)
        self.core = nn.Parameter(torch.empty(dim, dim, dim))  # [relation, source, out]

    def reset(self, generator: torch.Generator) -> None:
        nn.init.uniform_(self.core, -0.05, 0.05, generator=generator)

    def forward(self, encoded: Tensor, query_weight: Tensor) -> Tensor:
        """Turn encoded [B, 2, D] into [B, D]: out[b, o] = sum_rs relation[b, r] source[b, s] core[r, s, o]."""
        source = self.norm_source(encoded[:, SOURCE], query_weight)
        pairs = encoded[:, RELATION, :, None] * source[:, None, :]  # [B, D, D]
        # One product with D * D columns instead of a batch of small ones.
        return torch.mm(pairs.flatten(1), self.core.flatten(0, 1))


Decoder = TwoMult | Tucker


def make_decoder(name: str, dim: int) -> Decoder:
    """Make the decoder of this name (a choice of ModelConfig.decoder)."""
    match name:
        case "twomult":
            return TwoMult(RELATION)
        case "twomult-source":
            return TwoMult(SOURCE)
        case "tucker":
            return Tucker(dim)
    raise AssertionError(name)
