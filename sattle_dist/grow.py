"""Beginning a run with what another has learnt, on its graph or on that graph grown by `sattle-ingest --append-to`.

A grown graph keeps its ids and adds new ones behind them. So the rows of old entities and relations, with Adam's
moments, are read from the old checkpoint; new rows stay as the learner drew them from (seed, entity_id), their moments
zero. An inverse relation's row moves from r + R to r + R', as R' relations come before it now.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from sattle_dist import checkpoint
from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError, UserError
from sattle_dist.graph import Graph, GraphError
from sattle_dist.learner import Learner
from sattle_dist.storage import verify
from sattle_dist.stored import StoredTensors

RELATIONS = ("model.relations", "optimizer.model.relations.exp_avg", "optimizer.model.relations.exp_avg_sq")


def describe(graph: Graph, group: Group) -> dict[str, Any]:
    """Give what a later run must know to tell whether its graph extends this one. Every rank must call it."""
    mine: dict[str, Any] | str = ""
    if group.rank == 0:
        counts = {"entities": graph.num_entities, "relations": graph.num_relations}
        try:
            mine = {name: {"count": n, "labels": digest_labels(graph, name, n)} for name, n in counts.items()}
        except UserError as error:
            mine = str(error)
    shared: dict[str, Any] | str = group.share(mine)
    if isinstance(shared, str):
        raise GraphError(shared)
    return shared


def digest_labels(graph: Graph, table: str, count: int) -> str:
    """Hash the first `count` labels of a table, in the order of their ids."""
    lengths, text = hashlib.sha256(), hashlib.sha256()
    try:
        with pq.ParquetFile(graph.path / f"{table}.parquet") as file:
            for batch in file.iter_batches(columns=["label"]):
                labels = batch.column(0)[:count].cast(pa.large_binary())
                count -= len(labels)
                _, offsets, data = labels.buffers()
                if not len(labels) or data is None:
                    continue
                ends = np.frombuffer(offsets, np.int64)[labels.offset : labels.offset + len(labels) + 1]
                lengths.update(np.diff(ends).tobytes())
                text.update(memoryview(data)[int(ends[0]) : int(ends[-1])])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise GraphError(f"{graph.path}/{table}.parquet cannot be read ({error}); ingest the graph again") from None
    return hashlib.sha256(lengths.digest() + text.digest()).hexdigest()


def load(learner: Learner, graph: Graph, config: Config, old_run: Path) -> dict[str, Any]:
    """Fill a new learner with the best checkpoint of another run; give where it came from. Every rank must call it."""
    group = learner.group
    folder = choose(group, graph, config, old_run)
    facts = verify(folder, group)
    fill(learner, folder, facts)
    group.barrier()
    return {
        "run": str(old_run),
        "checkpoint": folder.name,
        "graph_checksum": facts["graph_checksum"],
        **{f"num_{name}": facts["graph"][name]["count"] for name in ("entities", "relations")},
    }


def choose(group: Group, graph: Graph, config: Config, old_run: Path) -> Path:
    """Give the best checkpoint of another run, if a run may begin with it. Every rank must call it."""
    found, problem = "", ""
    if group.rank == 0:
        try:
            folder = checkpoint.find(old_run, "best")
            check(checkpoint.read_facts(folder), graph, config, old_run)
            found = folder.name
        except UserError as error:
            problem = str(error)
    found, problem = group.share((found, problem))
    if problem:
        raise ConfigError(problem)
    return old_run / "checkpoints" / str(found)


def check(facts: dict[str, Any], graph: Graph, config: Config, old_run: Path) -> None:
    """Raise ConfigError where the graph does not extend the one trained before, or the model is another."""
    require_same_model(facts["config"]["model"], config, old_run)
    for name, now in (("entities", graph.num_entities), ("relations", graph.num_relations)):
        old = facts["graph"][name]
        if now < old["count"] or digest_labels(graph, name, old["count"]) != old["labels"]:
            raise ConfigError(
                f"--grow-from {old_run}: {graph.path} does not begin with the {old['count']} {name} of its graph; "
                "grow a graph with `sattle-ingest --append-to`, which keeps its ids"
            )


def require_same_model(old: Mapping[str, Any], config: Config, old_run: Path) -> None:
    """Raise ConfigError where another run's model, given by its settings, is not the one to be trained."""
    model = dataclasses.asdict(config.model)
    differing = [
        f"{name} was {value!r}, is {model.get(name)!r}"
        for name, value in old.items()
        if model.get(name) != value and not name.startswith("dropout")
    ]
    if differing:
        raise ConfigError(f"--grow-from {old_run}: that run has another model ({'; '.join(differing)})")


def fill(learner: Learner, folder: Path, facts: dict[str, Any]) -> None:
    """Copy the old rows and all that has no rows from a checkpoint's files into this rank's tensors."""
    old_relations, num_both = facts["graph"]["relations"]["count"], learner.model.relations.shape[0]
    shard, old_entities = learner.table.shard, facts["graph"]["entities"]["count"]
    stored = StoredTensors(folder)
    for name, target in checkpoint.local_tensors(learner, with_optimizer=True).items():
        if checkpoint.is_sharded(name, target):
            stop = min(old_entities, shard.stop)
            if shard.start < stop:
                target[: stop - shard.start] = torch.from_numpy(stored.rows(name, shard.start, stop))
        elif name in RELATIONS:
            copy_both_directions(target, torch.from_numpy(stored.whole(name)), old_relations, num_both // 2)
        else:
            target.copy_(torch.from_numpy(stored.whole(name)))


def copy_both_directions(target: Tensor, old: Tensor, old_relations: int, relations: int) -> None:
    """Copy relations [2R, D] into [2R', D]: those that ask forward at the same place, their inverses from R' on."""
    target[:old_relations] = old[:old_relations]
    target[relations : relations + old_relations] = old[old_relations:]
