"""A trained run from Python: ask it by name, take its vectors.

    from sattle_dist import load_run

    run = load_run("runs/demo")
    run.predict(source="iris_baker", relation="mother_of", top=5)    # [Prediction(source=..., target=..., ...), ...]
    run.predict(relation="mother_of", target="elena_baker", new_only=True)
    run.propose(relation="cousin_of", top=100)                       # the best triples that the graph does not hold
    run.predict_file("queries.tsv", "answers.parquet")
    run.vectors(["iris_baker", "olga_baker"])                        # float32 [2, dim]

In a program of several processes (torchrun) each process owns a part of the table: all of them make the same calls and
get the same answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from sattle_dist.bulk import BulkReport, predict_file
from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError
from sattle_dist.graph import Graph
from sattle_dist.labels import Labels
from sattle_dist.learner import Learner
from sattle_dist.predict import SOURCES, Prediction, predict, propose
from sattle_dist.run import open_run
from sattle_dist.runtime import Place, choose_device, joined
from sattle_dist.topk import Floats, fetch_rows


def load_run(path: str | Path, *, device: str = "auto", checkpoint: str = "best") -> Run:
    """Open the run directory that `sattle train` wrote, on `cpu`, `cuda`, or the best there is.

    The checkpoint is `best`, `latest`, or the name of one.
    Raises UserError (a ValueError) with one line for what a user can mend. A process group that the program has is used
    and left alone. Elsewhere one of this process alone is made to read the checkpoint, and taken apart again; in a
    program that torchrun started, one of its processes is made and stays. Every rank must call it.
    """
    settings = {"device": device, "threads": torch.get_num_threads()}
    config = Config().override(settings, "load_run").run
    if not isinstance(checkpoint, str):
        raise ConfigError(f"checkpoint must be 'best', 'latest' or the name of one, got {checkpoint!r}")
    if dist.is_initialized():
        chosen = choose_device(device, Place.from_environment())
        require_backends(chosen)
        return Run(*open_run(Path(path), Group(), chosen, checkpoint))
    with joined(config) as (group, chosen):
        return Run(*open_run(Path(path), group, chosen, checkpoint))


def require_backends(device: torch.device) -> None:
    """Raise ConfigError where the process group cannot carry what is sent: ids on the CPU, rows on the device."""
    backends = dist.get_backend_config()
    if missing := {"cpu", device.type} - {pair.partition(":")[0] for pair in backends.split(",")}:
        raise ConfigError(
            f"the process group has no backend for {missing.pop()} tensors (it has {backends}); make it with "
            'init_process_group("cpu:gloo,cuda:nccl"), or call load_run before there is one'
        )


class Run:
    """A trained run, opened. Its graph must still be where it was."""

    def __init__(self, learner: Learner, graph: Graph, config: Config) -> None:
        self.graph, self.config = graph, config
        self._learner, self._labels = learner, Labels(graph)

    def predict(
        self,
        *,
        relation: str,
        source: str | None = None,
        target: str | None = None,
        top: int = 10,
        new_only: bool = False,
    ) -> list[Prediction]:
        """Give the best answers to (source, relation, ?) or (?, relation, target), best first.

        With `new_only`, facts that the graph holds in any split are left out.
        """
        _at_least_one(top)
        return predict(
            self._learner,
            self.graph,
            self._labels,
            relation=relation,
            source=source,
            target=target,
            top=top,
            new_only=new_only,
        )

    def propose(self, *, relation: str, top: int = 10, sources: str = "seen") -> list[Prediction]:
        """Give the best triples of a relation that no split holds, best first.

        Asked are the sources that the relation has in train (`seen`), or `all` entities.
        """
        _at_least_one(top)
        if sources not in SOURCES:
            raise ConfigError(f"sources must be one of {', '.join(SOURCES)}, got {sources!r}")
        return propose(self._learner, self.graph, self._labels, relation=relation, top=top, sources=sources)

    def predict_file(
        self,
        queries: str | Path,
        out: str | Path,
        *,
        top: int = 10,
        new_only: bool = False,
        skip_unknown: bool = False,
    ) -> BulkReport:
        """Answer a TSV or Parquet file of queries into a Parquet file, in bounded memory (docs/use.md)."""
        _at_least_one(top)
        return predict_file(
            self._learner,
            self.graph,
            Path(queries),
            Path(out),
            top=top,
            new_only=new_only,
            skip_unknown=skip_unknown,
        )

    def vector(self, entity: str) -> Floats:
        """Give the embedding [dim] of an entity."""
        vector: Floats = self.vectors([entity])[0]
        return vector

    def vectors(self, entities: Iterable[str]) -> Floats:
        """Give the embeddings [n, dim] of entities, in their order."""
        if isinstance(entities, str):
            raise ConfigError(f"vectors takes a list of labels, got the single label {entities!r}; use vector")
        labels = entities.to_pylist() if isinstance(entities, pa.Array | pa.ChunkedArray) else list(entities)
        ids = self._labels.find_all(labels, "entities")
        if not len(ids):
            return np.empty((0, self.config.model.dim), np.float32)
        vectors: Floats = fetch_rows(self._learner, ids).cpu().numpy()
        return vectors

    def relation_vector(self, relation: str, *, inverse: bool = False) -> Floats:
        """Give the embedding [dim] of a relation, or of its inverse."""
        place = self._labels.find(relation, "relations") + (self.graph.num_relations if inverse else 0)
        vector: Floats = self._learner.model.relations[place].detach().cpu().numpy().copy()
        return vector


def _at_least_one(top: int) -> None:
    if not isinstance(top, int | np.integer) or isinstance(top, bool):
        raise ConfigError(f"top must be a whole number, got {top!r}")
    if top < 1:
        raise ConfigError(f"top must be at least 1, got {top}")
