"""Answer a query by name: which entities does the model expect as its targets?"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import numpy as np

from sattle_dist.config import UserError
from sattle_dist.evaluator import own_part, score_block
from sattle_dist.graph import SPLITS, Graph
from sattle_dist.learner import Learner


class UnknownLabel(UserError):
    """A label the graph does not hold."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    label: str
    score: float
    known_in: str  # the split that holds this fact, or ""


def predict(learner: Learner, graph: Graph, source: str, relation: str, top: int) -> list[Prediction]:
    """Give the `top` targets of (source, relation), best first. For a single process."""
    assert learner.group.world_size == 1
    entities = graph.entity_labels()
    source_id = find_label(source, entities, "entity")
    relation_id = find_label(relation, graph.relation_labels(), "relation")
    queries = own_part(np.array([source_id]), np.array([relation_id]), rank=0, world_size=1)
    scores = score_block(learner, queries)[0]
    best = scores.topk(min(top, len(scores)))

    key = np.array([source_id * 2 * graph.num_relations + relation_id])
    known = {int(t): split for split in SPLITS for t in graph.index(split).known_targets(key)[1]}
    return [
        Prediction(label=entities[entity_id], score=score, known_in=known.get(entity_id, ""))
        for entity_id, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def find_label(label: str, labels: list[str], kind: str) -> int:
    """Give the id of a label, or raise UnknownLabel with the nearest ones."""
    try:
        return labels.index(label)
    except ValueError:
        near = difflib.get_close_matches(label, labels, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UnknownLabel(f"no {kind} is called {label!r}{hint}") from None
