"""SAttLE as the paper describes it, in plain torch: both tokens all the way, a softmax over two keys, a row per triple.

Written apart from `sattle_dist`, which uses a reduced form; tests hold the two together. Parameters are taken by the
names they have in `QueryModel`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from sattle_dist.config import ModelConfig


def query_vectors(
    p: Mapping[str, Tensor], config: ModelConfig, source: Tensor, relation: Tensor, masks: Mapping[str, Tensor]
) -> Tensor:
    """Turn source rows [n, D] and relation ids [n] into query vectors [n, D], in training mode."""
    s_out, r_out = encode(p, config, source, p["relations"][relation], masks).unbind(1)
    if config.decoder == "twomult":
        return r_out
    if config.decoder == "twomult-source":
        return s_out
    s_out = F.batch_norm(
        s_out, None, None, p["decoder.norm_source.weight"], p["decoder.norm_source.bias"], training=True
    )
    return torch.einsum("br,bs,rso->bo", r_out, s_out, p["decoder.core"])


def encode(
    p: Mapping[str, Tensor], config: ModelConfig, source: Tensor, relation: Tensor, masks: Mapping[str, Tensor]
) -> Tensor:
    n, dim, heads = len(source), config.dim, config.num_heads
    scale, shift = p["encoder.norm_tokens.weight"], p["encoder.norm_tokens.bias"]
    s = F.batch_norm(source, None, None, scale[:dim], shift[:dim], training=True)
    r = F.batch_norm(relation, None, None, scale[dim:], shift[dim:], training=True)
    x = torch.stack([s, r], 1) * masks.get("input", 1)  # [n, 2, D]

    def project(name: str) -> Tensor:
        out = x @ p[f"encoder.attention.{name}.weight"].T + p[f"encoder.attention.{name}.bias"]
        return out.view(n, 2, heads, -1).transpose(1, 2)  # [n, H, 2, width]

    logits = project("query") @ project("key").transpose(-1, -2) / math.sqrt(config.dim_key)
    attention = torch.softmax(logits, -1) * full_mask(masks, "attention", config, n).transpose(1, 2)  # [n, H, 2, 2]
    mixed = (attention @ project("value")).transpose(1, 2).reshape(n, 2, -1)
    out = mixed @ p["encoder.attention.output.weight"].T + p["encoder.attention.output.bias"]
    x = x + out * full_mask(masks, "output", config, n)
    x = F.layer_norm(x, (dim,), p["encoder.norm_attention.weight"], p["encoder.norm_attention.bias"])
    hidden = F.relu(x @ p["encoder.widen.weight"].T + p["encoder.widen.bias"])
    out = hidden @ p["encoder.narrow.weight"].T + p["encoder.narrow.bias"]
    x = x + out * full_mask(masks, "hidden", config, n)
    if config.decoder == "tucker":
        return x
    return F.layer_norm(x, (dim,), p["encoder.norm_output.weight"], p["encoder.norm_output.bias"])


def full_mask(masks: Mapping[str, Tensor], site: str, config: ModelConfig, n: int) -> Tensor:
    """Extend a mask of the tokens that are read, [n, T, ...], to both tokens [n, 2, ...]; the other is not read."""
    shape = (n, 2, config.num_heads, 2) if site == "attention" else (n, 2, config.dim)
    if site not in masks:
        return torch.ones(shape, dtype=torch.float64)
    if masks[site].shape[1] == 2:
        return masks[site]
    full = torch.ones(shape, dtype=masks[site].dtype)
    full[:, 0 if config.decoder == "twomult-source" else 1] = masks[site][:, 0]
    return full
