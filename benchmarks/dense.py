"""The straightforward training step, as the authors describe it: what `benchmarks.step` compares with.

One example per triple, a Transformer block over both tokens, scores of all entities, dense smoothed labels,
binary_cross_entropy_with_logits and torch's Adam with its defaults.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sattle_dist.config import ModelConfig


class DenseSAttLE(nn.Module):
    """TwoMult over both tokens."""

    def __init__(self, config: ModelConfig, num_entities: int, num_relations: int) -> None:
        super().__init__()
        self.config = config
        dim, heads = config.dim, config.num_heads
        self.entities = nn.Embedding(num_entities, dim)
        self.relations = nn.Embedding(2 * num_relations, dim)
        self.entity_bias = nn.Parameter(torch.zeros(num_entities))
        self.norm_source, self.norm_relation = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.query, self.key = nn.Linear(dim, heads * config.dim_key), nn.Linear(dim, heads * config.dim_key)
        self.value = nn.Linear(dim, heads * config.dim_value)
        self.output = nn.Linear(heads * config.dim_value, dim)
        self.norm_attention, self.norm_output = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.widen, self.narrow = nn.Linear(dim, config.dim_hidden), nn.Linear(config.dim_hidden, dim)
        nn.init.xavier_normal_(self.entities.weight)
        nn.init.xavier_normal_(self.relations.weight)

    def forward(self, source: Tensor, relation: Tensor) -> Tensor:
        """Score all entities for (source, relation) [B]: [B, N]."""
        c = self.config
        rows = [self.norm_source(self.entities(source)), self.norm_relation(self.relations(relation))]
        x = F.dropout(torch.stack(rows, 1), c.dropout_input)  # [B, 2, D]
        split = (len(source), 2, c.num_heads, -1)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attention = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(c.dim_key), -1)  # [B, H, 2, 2]
        mixed = F.dropout(attention, c.dropout_attention) @ v
        out = self.output(mixed.transpose(1, 2).flatten(2))
        x = self.norm_attention(x + F.dropout(out, c.dropout_output))
        x = self.norm_output(x + F.dropout(self.narrow(F.relu(self.widen(x))), c.dropout_hidden))
        return x[:, 1] @ self.entities.weight.T + self.entity_bias


class DenseStep:
    """A model, its optimizer and one training step on a batch of triples."""

    def __init__(self, config: ModelConfig, num_entities: int, num_relations: int, smoothing: float) -> None:
        self.model = DenseSAttLE(config, num_entities, num_relations)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.001)
        self.num_entities, self.smoothing = num_entities, smoothing

    def __call__(self, source: Tensor, relation: Tensor, target: Tensor) -> float:
        self.optimizer.zero_grad()
        scores = self.model(source, relation)
        labels = torch.zeros_like(scores).scatter_(1, target[:, None], 1.0)
        labels = (1 - self.smoothing) * labels + 1 / self.num_entities
        loss = F.binary_cross_entropy_with_logits(scores, labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()
