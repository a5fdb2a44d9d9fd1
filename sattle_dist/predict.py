"""Ask a trained run: which entities does it expect in a triple, and which new triples of a relation?

A *share* is exp(score) / sum of exp(score) over all entities: the part of the softmax that falls to the candidate. It
is what the softmax loss fits, not a calibrated probability: the shares of a query sum to 1 over all entities, so
several true targets divide it among them. The loss filtered fits the share that a target would have without the other
targets; bce and kvsall fit the sigmoid of the score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sattle_dist.config import ConfigError
from sattle_dist.graph import SPLITS, Graph, Int64s, QueryIndex
from sattle_dist.labels import Labels
from sattle_dist.learner import Learner
from sattle_dist.loss import SOFTMAXES
from sattle_dist.topk import Best, best_candidates, blocks

NEW = -1  # in place of a split: no split holds the triple
SOURCES = ("seen", "all")
INDEX_ROWS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A triple that the model proposes; `asked` says whether its target or its source was asked for."""

    source: str
    relation: str
    target: str
    asked: str
    score: float
    share: float
    known_in: str  # the split that holds this fact, or ""

    @property
    def label(self) -> str:
        """The answer: the label that was asked for."""
        return self.target if self.asked == "target" else self.source


def predict(
    learner: Learner,
    graph: Graph,
    labels: Labels,
    *,
    relation: str,
    source: str | None = None,
    target: str | None = None,
    top: int = 10,
    new_only: bool = False,
) -> list[Prediction]:
    """Give the best answers to (source, relation, ?) or (?, relation, target). Every rank must call it."""
    if (source is None) == (target is None):
        raise ConfigError("give a source or a target, and not both: the other one is what is asked for")
    given, asked = (source, "target") if source is not None else (target, "source")
    assert given is not None
    entity = np.array([labels.find(given, "entities")])
    query = np.array([labels.find(relation, "relations") + (graph.num_relations if asked == "source" else 0)])
    best = best_candidates(learner, entity, query, top, known_facts(graph) if new_only else ())
    known = splits_holding(graph, entity, query, best)
    answers = [place for place in range(best.score.shape[1]) if best.score[0, place] > -np.inf]
    names = labels.of(best.entity_id[0, answers], "entities")
    return [
        Prediction(
            source=given if asked == "target" else name,
            relation=relation,
            target=name if asked == "target" else given,
            asked=asked,
            score=float(best.score[0, place]),
            share=float(best.share[0, place]),
            known_in=split_name(known[0, place]),
        )
        for name, place in zip(names, answers, strict=True)
    ]


def known_facts(graph: Graph) -> list[QueryIndex]:
    """Map the grouped triples of every split."""
    return [graph.index(split) for split in SPLITS]


def split_name(place: int) -> str:
    """Name the split at this place of SPLITS, or nothing for NEW."""
    return SPLITS[place] if place != NEW else ""


def splits_holding(graph: Graph, entity: Int64s, relation: Int64s, best: Best) -> Int64s:
    """Say for each answer [G, K] which split holds that fact (its place in SPLITS), or NEW."""
    split_of = np.full(best.entity_id.shape, NEW)
    code = np.arange(len(entity))[:, None] * graph.num_entities + best.entity_id  # one number per (query, answer)
    for place, split in reversed(list(enumerate(SPLITS))):
        counts, known = graph.index(split).known_targets(entity * 2 * graph.num_relations + relation)
        split_of[np.isin(code, np.repeat(np.arange(len(entity)), counts) * graph.num_entities + known)] = place
    return split_of


def propose(
    learner: Learner,
    graph: Graph,
    labels: Labels,
    *,
    relation: str,
    top: int = 10,
    sources: str = "seen",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Prediction]:
    """Give the best triples of a relation that no split holds, best first. Every rank must call it.

    Asked are the sources that the relation has in train (`seen`), or all entities (`all`). The losses
    softmax and filtered leave the scores of a query free up to a constant, so triples of different sources are compared
    by share; for the other losses by score. No more than twice `top` triples, and the answers of one block, are held at
    a time.
    """
    relation_id = labels.find(relation, "relations")
    asked = seen_sources(graph, relation_id) if sources == "seen" else np.arange(graph.num_entities)
    if not len(asked):
        raise ConfigError(
            f"train has no fact of {relation!r}, and so no source to ask; --sources all asks every entity"
        )
    by_share = learner.config.train.loss in SOFTMAXES
    kept = np.empty(0, _TRIPLE)
    for block in blocks(len(asked), top):
        source = asked[block]
        best = best_candidates(learner, source, np.full(len(source), relation_id), top, known_facts(graph))
        found = np.empty(best.score.size, _TRIPLE)
        found["source"] = np.repeat(source, best.score.shape[1])
        found["target"], found["score"], found["share"] = best.entity_id.flat, best.score.flat, best.share.flat
        kept = np.concatenate([kept, found[found["score"] > -np.inf]])
        order = np.lexsort((kept["target"], kept["source"], -kept["share" if by_share else "score"]))
        kept = kept[order[:top]]
        on_progress(block.stop, len(asked))
    names = zip(labels.of(kept["source"], "entities"), labels.of(kept["target"], "entities"), strict=True)
    return [
        Prediction(
            source=source_name,
            relation=relation,
            target=target_name,
            asked="target",
            score=float(triple["score"]),
            share=float(triple["share"]),
            known_in="",
        )
        for (source_name, target_name), triple in zip(names, kept, strict=True)
    ]


_TRIPLE = np.dtype([("source", np.int64), ("target", np.int64), ("score", np.float32), ("share", np.float32)])


def seen_sources(graph: Graph, relation_id: int) -> Int64s:
    """List the sources that a relation has in train, in the order of their ids, reading the index part by part."""

    def parts() -> Iterator[Int64s]:
        index = graph.index("train")
        for start in range(0, len(index), INDEX_ROWS):
            source, relation = index.split_keys(np.asarray(index.queries[start : start + INDEX_ROWS]))
            yield source[relation == relation_id]

    return np.concatenate([np.empty(0, np.int64), *parts()])
