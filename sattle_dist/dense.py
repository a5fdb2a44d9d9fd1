"""The losses of loss.py stated plainly: full scores, dense labels, autograd. What tests compare with.

Shapes: G queries, N entities, D dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dense_loss(
    name: str,
    query: Tensor,
    rows: Tensor,
    bias: Tensor,
    targets: list[list[int]],
    smoothing: float,
    weight_power: float = 1.0,
    teacher: tuple[Tensor, float] | None = None,
) -> Tensor:
    """State the losses plainly: full scores [G, N], dense labels, one example per triple (kvsall: per query).

    A triple whose query has k targets weighs k ** (weight_power - 1) in the mean over the examples. A teacher is its
    scores [G, N] and its weight.
    """
    scores = query @ rows.T + bias
    if teacher is not None:
        lesson = dense_lesson(scores, *teacher, targets, weight_power, struck_out=name == "filtered")
        return dense_loss(name, query, rows, bias, targets, smoothing, weight_power) + lesson
    num_entities = len(rows)
    if name == "kvsall":
        labels = torch.zeros_like(scores)
        for i, ids in enumerate(targets):
            labels[i, ids] = 1
        examples, weight = scores, scores.new_ones(len(targets))
    else:
        place = torch.tensor([i for i, ids in enumerate(targets) for _ in ids])
        target = torch.tensor([t for ids in targets for t in ids])
        examples = scores[place]
        weight = scores.new_tensor([len(targets[i]) ** (weight_power - 1) for i in place])
        if name == "softmax":
            losses = F.cross_entropy(examples, target, label_smoothing=smoothing, reduction="none")
            return (losses * weight).sum() / weight.sum()
        if name == "filtered":
            known = torch.zeros_like(examples, dtype=torch.bool)
            for example, i in enumerate(place):
                known[example, targets[i]] = True
            others = examples.masked_fill(known, -torch.inf).logsumexp(1)
            margin = examples.gather(1, target[:, None])[:, 0] - others
            label = torch.full_like(margin, 1 - smoothing)
            return F.binary_cross_entropy_with_logits(margin, label, weight, reduction="sum") / weight.sum()
        labels = F.one_hot(target, num_entities).to(scores.dtype)
    if smoothing:
        labels = (1 - smoothing) * labels + 1 / num_entities
    losses = F.binary_cross_entropy_with_logits(examples, labels, reduction="none").mean(1)
    return (losses * weight).sum() / weight.sum()


def dense_lesson(
    scores: Tensor,
    teacher_scores: Tensor,
    teacher_weight: float,
    targets: list[list[int]],
    weight_power: float,
    *,
    struck_out: bool,
) -> Tensor:
    """State plainly what a teacher adds to the loss: the cross-entropy of its softmax and ours, query by query."""
    weight = scores.new_tensor([len(ids) ** weight_power if ids else 0.0 for ids in targets])
    total = scores.new_zeros(())
    for i, ids in enumerate(targets):
        others = torch.ones(scores.shape[1], dtype=torch.bool)
        if struck_out:
            others[ids] = False
        share = teacher_scores[i, others].softmax(0)
        total = total - weight[i] * (share * scores[i, others].log_softmax(0)).sum()
    return teacher_weight * total / weight.sum()
