"""The training of the authors' model, with a stand-in of the same parts, against the dense formula."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import authors

NUM_ENTITIES, NUM_RELATIONS, DIM = 6, 2, 4
HEADS, DIM_KEY, DIM_VALUE = 3, 2, 5
TRIPLES = np.array([(0, 0, 1), (0, 0, 2), (3, 1, 0), (4, 1, 5), (2, 0, 3)])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.w_qs, self.w_ks = nn.Linear(DIM, HEADS * DIM_KEY), nn.Linear(DIM, HEADS * DIM_KEY)
        self.w_vs, self.fc = nn.Linear(DIM, HEADS * DIM_VALUE), nn.Linear(HEADS * DIM_VALUE, DIM)
        self.attention = nn.Module()
        self.attention.temperature = math.sqrt(DIM_KEY)  # type: ignore[assignment]
        self.attention.dropout = self.dropout = nn.Dropout(0.5)
        self.layer_norm = nn.LayerNorm(DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = (layer(tokens).chunk(HEADS, 2) for layer in (self.w_qs, self.w_ks, self.w_vs))
        mixed = [
            torch.softmax(q @ k.transpose(1, 2) / math.sqrt(DIM_KEY), 2) @ v
            for q, k, v in zip(query, key, value, strict=True)
        ]
        out: Tensor = self.layer_norm(tokens + self.fc(torch.cat(mixed, 2)))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Conv1d(DIM, 7, 1), nn.Conv1d(7, DIM, 1)
        self.layer_norm, self.dropout = nn.LayerNorm(DIM), nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.layer_norm(tokens + self.w_2(F.relu(self.w_1(tokens.transpose(1, 2)))).transpose(1, 2))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slf_attn, self.pos_ffn = Attention(), FeedForward()

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.pos_ffn(self.slf_attn(tokens))
        return out


class StandIn(nn.Module):
    """Has what `benchmarks.authors` asks of the authors' model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tr_ent_embedding = nn.Parameter(torch.randn(NUM_ENTITIES, DIM))
        self.rel_embedding = nn.Parameter(torch.randn(2 * NUM_RELATIONS, DIM))
        self.b = nn.Parameter(torch.randn(NUM_ENTITIES))
        self.ent_bn, self.rel_bn = nn.BatchNorm1d(DIM), nn.BatchNorm1d(DIM)
        self.encoder = nn.Module()
        self.encoder.dropout = nn.Dropout(0.5)
        self.encoder.layer_stack = nn.ModuleList([Layer()])

    def forward(self, triples: Tensor) -> Tensor:
        source = self.ent_bn(self.tr_ent_embedding[triples[:, 0]])
        relation = self.rel_bn(self.rel_embedding[triples[:, 1]])
        tokens = torch.stack([source, relation], 1)
        (layer,) = self.encoder.layer_stack  # type: ignore[misc]
        scores: Tensor = layer(tokens)[:, 1] @ self.tr_ent_embedding.T + self.b
        return scores

    def cal_loss(self, scores: Tensor, triples: Tensor) -> Tensor:
        labels = torch.zeros_like(scores, device="cuda")
        labels[torch.arange(len(scores)), triples[:, 2]] = 1
        return F.binary_cross_entropy_with_logits(scores, 0.9 * labels + 1 / NUM_ENTITIES)


def test_gradients_are_those_of_the_loss(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(authors, "SLICE", 2)
    model, triples = StandIn(), torch.from_numpy(authors.both_directions(TRIPLES, NUM_RELATIONS))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    authors.compare(model, triples, authors.vectors)
    assert "gradients as the authors'" in capsys.readouterr().out
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    monkeypatch.setattr(authors, "SMOOTHING", 0.2)
    with pytest.raises(AssertionError):
        authors.compare(model, triples, authors.vectors)


def test_ranks_are_filtered() -> None:
    model = StandIn().eval()
    known = authors.known_targets([TRIPLES], NUM_RELATIONS)
    assert known[0, 0] == [1, 2]
    assert known[5, 1 + NUM_RELATIONS] == [4]
    triples = authors.both_directions(TRIPLES, NUM_RELATIONS)
    assert triples[5:].tolist() == [[1, 2, 0], [2, 2, 0], [0, 3, 3], [5, 3, 4], [3, 2, 2]]
    with torch.no_grad():
        scores = model(torch.from_numpy(triples)).tolist()
    expected = []
    for (source, relation, target), row in zip(triples.tolist(), scores, strict=True):
        rivals = [e for e in range(NUM_ENTITIES) if e not in known[source, relation]]
        expected.append(1 / (1 + sum(row[e] >= row[target] for e in rivals)))
    assert authors.mrr(model, triples, known) == pytest.approx(sum(expected) / len(expected))


def test_a_folder_without_the_code_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(authors.main, [str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert f"{tmp_path} has no model.py; it must hold the code that the paper links to" in result.output
