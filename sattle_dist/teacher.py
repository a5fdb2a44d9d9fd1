"""Learning from another run: its scores of the candidates a target competes with, beside the targets themselves.

A teacher is the best checkpoint of a run of the same graph, frozen. Its entity table is cut over the ranks like that of
the run it teaches, so its scores are formed shard by shard, and never travel.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from sattle_dist import checkpoint
from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError
from sattle_dist.graph import Graph
from sattle_dist.learner import Learner
from sattle_dist.loss import SOFTMAXES
from sattle_dist.run import read_run


def open_teacher(
    config: Config, graph: Graph, group: Group, device: torch.device
) -> tuple[Learner, dict[str, str]] | None:
    """Open the teacher that a config names, if it names one; give also what identifies it. Every rank must call it."""
    if not config.run.teacher:
        return None
    if config.train.loss not in SOFTMAXES:
        raise ConfigError(f"--teacher goes with --loss {' or '.join(SOFTMAXES)}, got {config.train.loss!r}")
    run_dir = Path(config.run.teacher)
    folder, facts, its_config = read_run(run_dir, group, "best")
    if facts["graph_checksum"] != graph.checksum:
        raise ConfigError(
            f"--teacher {run_dir} was trained on another graph than {graph.path} (checksum "
            f"{facts['graph_checksum'][:20]}, not {graph.checksum[:20]}); train a teacher on this one"
        )
    # It multiplies as the run that it teaches does.
    its_config = its_config.override({"precision": config.run.precision}, "teacher")
    learner = Learner(its_config, graph.num_entities, graph.num_relations, group, device)
    checkpoint.load(learner, folder, with_optimizer=False, facts=facts)
    return learner, {"run": str(run_dir), "checkpoint": folder.name, "digest": digest(facts)}


def digest(facts: dict[str, Any]) -> str:
    """Hash the checksums of a checkpoint's files: the same for the same weights, wherever they are."""
    return hashlib.sha256(json.dumps(facts["files"], sort_keys=True).encode()).hexdigest()


def require_same_teacher(before: dict[str, str] | None, now: dict[str, str] | None) -> None:
    """Raise ConfigError where a run is to be continued with another teacher than it began with, or without it."""
    if before and not now:
        raise ConfigError(f"this run learns from a teacher; name it: --teacher {before['run']}")
    if now and not before:
        raise ConfigError(f"this run began without a teacher; leave --teacher {now['run']} away, or use another --out")
    if before and now and before["digest"] != now["digest"]:
        raise ConfigError(
            f"--teacher {now['run']} ({now['checkpoint']}) is not what this run began with, {before['checkpoint']} of "
            f"{before['run']}; name that one, or use another --out"
        )
