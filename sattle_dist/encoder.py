"""The SAttLE encoder: one Transformer block with many heads over the two tokens (source, relation).

The block is the paper's, computed in a reduced form that gives the same outputs and gradients:
- only the tokens the decoder reads are carried past the attention (one for TwoMult, two for Tucker);
- with two tokens the softmax is a sigmoid of the difference of two logits, so keys are needed once, for the difference
  of the two tokens, and the keys' bias cancels;
- a head's value and output projections follow one another without anything between, so they are multiplied into one
  matrix per step, and the tokens are mixed before it, at D numbers a head, instead of after at V numbers a token.

Shapes: B queries, D dim, H heads, K dim_key, V dim_value, T tokens the decoder reads (1 or 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sattle_dist.config import ModelConfig
from sattle_dist.randomness import MaskSpec

SOURCE, RELATION = 0, 1

Masks = Mapping[str, Tensor]
"""Dropout masks by site, already scaled; empty in evaluation."""


def identity(x: Tensor) -> Tensor:
    return x


class WeightedBatchNorm(nn.Module):
    """Batch norm whose moments weigh each query, so that a query with k targets counts as k triples.

    `sum_over_processes` makes them the moments of the global batch; it is set from outside where there are several
    processes. Running statistics follow torch's BatchNorm1d (momentum 0.1, unbiased variance).
    """

    MOMENTUM = 0.1
    EPSILON = 1e-5

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.sum_over_processes: Callable[[Tensor], Tensor] = identity

    def forward(self, x: Tensor, query_weight: Tensor) -> Tensor:
        """Normalise x [B, F]; query_weight [B] is used in training only."""
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.EPSILON)
        # Double precision: a variance as a difference of moments would lose digits in single precision.
        wide, w = x.double(), query_weight.double()
        sums = torch.cat([w @ wide, w @ wide.square(), w.sum()[None]])  # [2F + 1]
        first, second, total = self.sum_over_processes(sums).tensor_split([x.shape[1], 2 * x.shape[1]])
        mean = first / total
        var = (second / total - mean.square()).clamp_min(0)
        self._update_running(mean.detach(), var.detach(), total.detach())
        scale = self.weight * (var + self.EPSILON).rsqrt().to(x.dtype)
        return (x - mean.to(x.dtype)) * scale + self.bias

    def _update_running(self, mean: Tensor, var: Tensor, total: Tensor) -> None:
        unbiased = var * (total / (total - 1).clamp_min(1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.MOMENTUM)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.MOMENTUM)


class Attention(nn.Module):
    """Multi-head attention over two tokens, for the T tokens the decoder reads."""

    def __init__(self, config: ModelConfig, reads: tuple[int, ...]) -> None:
        super().__init__()
        self.num_heads, self.dim_key, self.dim_value = config.num_heads, config.dim_key, config.dim_value
        self.reads = reads
        self.query = nn.Linear(config.dim, self.num_heads * self.dim_key)
        self.key = nn.Linear(config.dim, self.num_heads * self.dim_key)
        self.value = nn.Linear(config.dim, self.num_heads * self.dim_value)
        self.output = nn.Linear(self.num_heads * self.dim_value, config.dim)
        # It is part of the model and of its parameter count, but both logits of a softmax get it, so its gradient is
        # zero: never computed.
        self.key.bias.requires_grad_(False)

    def reset(self, generator: torch.Generator) -> None:
        for linear, width in (
            (self.query, self.dim_key),
            (self.key, self.dim_key),
            (self.value, self.dim_value),
        ):
            std = math.sqrt(2 / (linear.in_features + width))
            nn.init.normal_(linear.weight, std=std, generator=generator)
        nn.init.xavier_normal_(self.output.weight, generator=generator)
        for linear in (self.query, self.key, self.value, self.output):
            reset_bias(linear, generator)

    def forward(self, tokens: Tensor, masks: Masks) -> Tensor:
        """Attend from the read tokens of tokens [B, 2, D] to both; give [B, T, D]."""
        num_queries, num_read, heads = len(tokens), len(self.reads), self.num_heads
        query = self.query(self.read(tokens)).view(num_queries, num_read, heads, -1)  # [B, T, H, K]
        difference = tokens[:, SOURCE] - tokens[:, RELATION]
        key = F.linear(difference, self.key.weight).view(num_queries, 1, heads, -1)  # [B, 1, H, K]
        to_source = torch.sigmoid((query * key).sum(-1) / math.sqrt(self.dim_key))  # [B, T, H]
        attention = dropout(torch.stack([to_source, 1 - to_source], -1), masks, "attention")  # [B, T, H, 2]
        mixed = torch.bmm(attention.flatten(1, 2), tokens).view(num_queries, num_read, -1)  # [B, T, H * D]
        # Value and output projection of a head, multiplied once for all queries: [H, D, D] and, for the bias, [H, D].
        output = self.output.weight.view(-1, heads, self.dim_value).permute(1, 2, 0)  # [H, V, D]
        both = torch.bmm(self.value.weight.view(heads, self.dim_value, -1).transpose(1, 2), output)
        bias = torch.bmm(self.value.bias.view(heads, 1, self.dim_value), output).squeeze(1)
        return mixed @ both.flatten(0, 1) + attention.sum(-1) @ bias + self.output.bias

    def read(self, tokens: Tensor) -> Tensor:
        """Pick the tokens that are read, as a view: [B, 2, D] -> [B, T, D]."""
        return tokens[:, self.reads[0] : self.reads[-1] + 1]


class Encoder(nn.Module):
    """Encode (source row, relation row) into the T tokens that the decoder reads.

    Order as in the authors' code: batch norm of each token, dropout, attention, dropout, residual, layer norm,
    feed-forward, dropout, residual, layer norm (the last one only where the decoder wants it).
    """

    def __init__(self, config: ModelConfig, reads: tuple[int, ...], *, last_norm: bool) -> None:
        super().__init__()
        self.config = config
        # One norm over the two rows side by side is the paper's two separate norms, with one exchange of moments.
        self.norm_tokens = WeightedBatchNorm(2 * config.dim)
        self.attention = Attention(config, reads)
        self.norm_attention = nn.LayerNorm(config.dim)
        self.widen = nn.Linear(config.dim, config.dim_hidden)
        self.narrow = nn.Linear(config.dim_hidden, config.dim)
        self.norm_output = nn.LayerNorm(config.dim) if last_norm else nn.Identity()

    def reset(self, generator: torch.Generator) -> None:
        """Initialise every weight from this generator."""
        self.attention.reset(generator)
        nn.init.kaiming_uniform_(self.widen.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        nn.init.kaiming_uniform_(self.narrow.weight, mode="fan_in", nonlinearity="relu", generator=generator)
        for linear in (self.widen, self.narrow):
            reset_bias(linear, generator)

    def mask_specs(self) -> dict[str, MaskSpec]:
        """Say which dropout masks a training step needs, for one query."""
        config, num_read = self.config, len(self.attention.reads)
        specs = {
            "input": MaskSpec((2, config.dim), config.dropout_input),
            "attention": MaskSpec((num_read, config.num_heads, 2), config.dropout_attention),
            "output": MaskSpec((num_read, config.dim), config.dropout_output),
            "hidden": MaskSpec((num_read, config.dim), config.dropout_hidden),
        }
        return {name: spec for name, spec in specs.items() if spec.rate > 0}

    def forward(self, source: Tensor, relation: Tensor, query_weight: Tensor, masks: Masks) -> Tensor:
        """Encode source [B, D] and relation [B, D] into [B, T, D]."""
        tokens = self.norm_tokens(torch.cat([source, relation], 1), query_weight)
        tokens = dropout(tokens.view(-1, 2, source.shape[1]), masks, "input")
        attended = dropout(self.attention(tokens, masks), masks, "output")
        x = self.norm_attention(self.attention.read(tokens) + attended)
        hidden = self.narrow(F.relu(self.widen(x)))
        out: Tensor = self.norm_output(x + dropout(hidden, masks, "hidden"))
        return out


def dropout(x: Tensor, masks: Masks, site: str) -> Tensor:
    """Multiply x by the mask of this site, if there is one."""
    return x * masks[site] if site in masks else x


def reset_bias(linear: nn.Linear, generator: torch.Generator) -> None:
    """Initialise a bias as torch's nn.Linear does, which the authors leave as it is."""
    bound = 1 / math.sqrt(linear.in_features)
    nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
