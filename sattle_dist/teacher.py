"""Which teacher a run has: another run of the same graph, from whose scores it learns beside its targets.

The other run is there already, or a recipe is named: then it is a part of this one, trained first, in RUN/teacher.

A teacher is the best checkpoint of that run, frozen. Its entity table is cut over the ranks like that of the run it
teaches, so its scores are formed shard by shard, and never travel (`run.open_teacher` opens it, loss.py heeds it). What
identifies it is a digest of its weights, kept in every checkpoint of the run that it teaches.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sattle_dist import checkpoint
from sattle_dist.config import Config, ConfigError, load_recipe, recipe_names
from sattle_dist.loss import SOFTMAXES
from sattle_dist.storage import read_facts

OWN = "teacher"  # where a run keeps the teacher that it has trained itself

Identity = dict[str, str]


def own_teacher(config: Config, run_dir: Path) -> Config | None:
    """Give the config of the teacher that a run trains first; None where it has none, or one that is there already."""
    if config.run.teacher not in recipe_names():
        return None
    recipe = load_recipe(config.run.teacher)
    return Config(
        model=recipe.model,
        train=replace(recipe.train, seed=config.train.seed),
        eval=config.eval,
        run=replace(config.run, teacher=recipe.run.teacher, out=str(run_dir / OWN), grow_from="", resume="auto"),
    )


def named_teacher(config: Config, run_dir: Path, *, begun: bool) -> Identity | None:
    """Identify the teacher that a config names, if it names one; a run's own is not there before the run has begun."""
    if not config.run.teacher:
        return None
    if config.train.loss not in SOFTMAXES:
        raise ConfigError(f"--teacher goes with --loss {' or '.join(SOFTMAXES)}, got {config.train.loss!r}")
    its_own = own_teacher(config, run_dir)
    if its_own and not begun:
        return None
    place = Path(its_own.run.out if its_own else config.run.teacher)
    folder = checkpoint.find(place, "best")
    return identify(place, folder, read_facts(folder))


def identify(run_dir: Path, folder: Path, facts: dict[str, Any]) -> Identity:
    """Say which run and checkpoint it is, and hash the checksums of its files: the same wherever they are."""
    digest = hashlib.sha256(json.dumps(facts["files"], sort_keys=True).encode()).hexdigest()
    return {"run": str(run_dir), "checkpoint": folder.name, "digest": digest}


def require_same_teacher(before: Identity | None, now: Identity | None) -> None:
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
