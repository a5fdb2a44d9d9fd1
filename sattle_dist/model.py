"""The replicated part of SAttLE: relation table, encoder and decoder. It turns queries into vectors and knows no ranks.

The entity table, the only big thing, is in `table.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sattle_dist.config import ModelConfig
from sattle_dist.decoder import make_decoder
from sattle_dist.encoder import Encoder, Masks, WeightedBatchNorm
from sattle_dist.randomness import WEIGHTS, MaskSpec, normal_rows


class QueryModel(nn.Module):
    """Turn (source row, relation) into the query vector [D] whose product with an entity's row is its score."""

    def __init__(self, config: ModelConfig, num_relations: int, seed: int) -> None:
        super().__init__()
        num_both = 2 * num_relations  # every relation and its inverse
        self.decoder = make_decoder(config.decoder, config.dim)
        self.encoder = Encoder(config, self.decoder.reads, last_norm=self.decoder.last_norm)
        std = math.sqrt(2 / (num_both + config.dim))  # Xavier normal
        self.relations = nn.Parameter(normal_rows(0, num_both, config.dim, std, WEIGHTS, seed))
        generator = torch.Generator().manual_seed(seed)
        self.encoder.reset(generator)
        self.decoder.reset(generator)

    def mask_specs(self) -> dict[str, MaskSpec]:
        """Say which dropout masks a training step needs, for one query."""
        return self.encoder.mask_specs()

    def norms(self) -> list[WeightedBatchNorm]:
        """List the batch norms, whose moments are to be those of the global batch."""
        return [module for module in self.modules() if isinstance(module, WeightedBatchNorm)]

    def forward(self, source: Tensor, relation: Tensor, query_weight: Tensor, masks: Masks) -> Tensor:
        """Turn source rows [B, D] and relation ids [B] into query vectors [B, D]."""
        # Not self.relations[relation]: several threads of a CPU would add up its gradient in an order of their own.
        encoded = self.encoder(source, self.relations.index_select(0, relation), query_weight, masks)
        query: Tensor = self.decoder(encoded, query_weight)
        return query


def count_parameters(config: ModelConfig, num_entities: int, num_relations: int) -> tuple[int, int]:
    """Count (NFP, EFP): free parameters outside and inside the two embedding tables.

    The bias of each entity is no embedding, so it counts among the first, as in the paper.
    """
    with torch.device("meta"):
        decoder = make_decoder(config.decoder, config.dim)
        encoder = Encoder(config, decoder.reads, last_norm=decoder.last_norm)
    others = sum(p.numel() for module in (encoder, decoder) for p in module.parameters())
    return others + num_entities, (num_entities + 2 * num_relations) * config.dim
