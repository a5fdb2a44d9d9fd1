"""Which teachers a run has: other runs of the same graph, from whose mean score it learns beside its targets.

Such a run is there already, or a recipe is named: then it is a part of this one, trained first, in RUN/teacher-1.

A teacher is the best checkpoint of that run, frozen. Its entity table is cut over the ranks like that of the run it
teaches, so its scores are formed shard by shard, and never travel (`run.open_teachers` opens it, loss.py heeds it).
What identifies it is a digest of its weights, kept in every checkpoint of the run that it teaches.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sattle_dist import checkpoint
from sattle_dist.config import Config, ConfigError, load_recipe, recipe_names
from sattle_dist.graph import Graph
from sattle_dist.loss import SOFTMAXES
from sattle_dist.storage import read_facts

Identity = dict[str, str]


@dataclass(frozen=True)
class Named:
    """Another run that a config names: where it is, and the config to train it with first, if a recipe was named."""

    place: Path
    own: Config | None


def names(config: Config) -> list[str]:
    """List the teachers that a config names: runs and recipes."""
    whole = config.run.teacher
    if not whole or os.path.isdir(whole):  # whose name may hold a comma
        return [whole] if whole else []
    given = [name.strip() for name in whole.split(",")]
    if not all(given):
        raise ConfigError(f"--teacher {whole!r} has a comma without a run or recipe on both sides of it")
    return given


def with_absolute_paths(config: Config) -> dict[str, str]:
    """Give the settings that name other runs, so that these are found from anywhere."""
    recipes, given, begin = recipe_names(), names(config), config.run.grow_from
    teachers = [name if name in recipes else str(Path(name).absolute()) for name in given]
    if begin and not (begin in recipes and begin in given):
        if begin in recipes and not Path(begin).exists():
            raise ConfigError(f"--grow-from {begin}: that is a recipe; to train it first, name it with --teacher too")
        begin = str(Path(begin).absolute())
    return {"teacher": ",".join(teachers), "grow_from": begin}


def named(config: Config, run_dir: Path) -> list[Named]:
    """Find the teachers that a config names. A recipe has the run's own seed; named again, the next one each time.

    What a teacher named before it has learnt from already is not trained again, but found with that teacher.
    """
    recipes, given, found = recipe_names(), names(config), list[Named]()
    for i, name in enumerate(given):
        place, own = run_dir / f"teacher-{i + 1}", None
        if name in recipes:
            recipe = load_recipe(name)
            train = replace(recipe.train, seed=config.train.seed + given[:i].count(name))
            named_runs = {"teacher": recipe.run.teacher, "grow_from": recipe.run.grow_from}
            run = config.override({"out": str(place), "resume": "auto", **named_runs}, name).run
            own = Config(model=recipe.model, train=train, eval=config.eval, run=run)
        elif Path(name).exists() or not place.is_dir():  # else a recipe that this release has no more
            place = Path(name)
        this = Named(place, own)
        found.append(next((each for each in ancestors(found) if same_training(each, this)), this))
    return found


def ancestors(teachers: list[Named]) -> Iterator[Named]:
    """Give the teachers of teachers, and theirs, that are trained with them."""
    for each in teachers:
        if each.own:
            its_own = named(each.own, each.place)
            yield from its_own
            yield from ancestors(its_own)


def same_training(one: Named, other: Named) -> bool:
    """Tell whether two recipes, each with its seed, make the same run, wherever it is."""
    if not (one.own and other.own):
        return False
    return replace(one.own, run=replace(one.own.run, out="")) == replace(other.own, run=replace(other.own.run, out=""))


def beginning(config: Config, run_dir: Path) -> Named | None:
    """Find the run that a run begins with, if any: one of its own teachers, named by its recipe, or any other run."""
    if not config.run.grow_from:
        return None
    for name, its_teacher in zip(names(config), named(config, run_dir), strict=True):
        if name == config.run.grow_from:
            return its_teacher
    return Named(Path(config.run.grow_from), None)


def own_teachers(config: Config, run_dir: Path) -> list[Config]:
    """Give the configs of the teachers that a run trains first, but for those that come with another of them."""
    return [each.own for each in named(config, run_dir) if each.own and each.place.parent == run_dir]


def identify_teachers(config: Config, run_dir: Path, graph: Graph, *, begun: bool) -> Identity | None:
    """Identify the teachers that a config names, if any; a run's own are not there before the run has begun."""
    teachers = named(config, run_dir)
    require_teachable(config)
    require_discountable(config)
    found = []
    for each in teachers:
        if begun or not each.own:
            if each.own and not each.place.exists():
                raise ConfigError(f"the teacher that this run has trained first, {each.place}, is gone; put it back")
            if not each.place.exists():
                raise ConfigError(f"--teacher: there is no run at {each.place}, and no recipe {each.place.name!r}")
            folder = checkpoint.find(each.place, "best")
            facts = read_facts(folder)
            require_same_graph(each.place, facts, graph)
            found.append((each.place, folder, facts))
    return identify(found) if teachers and len(found) == len(teachers) else None


def require_teachable(config: Config) -> None:
    """Raise ConfigError where a loss cannot heed a teacher."""
    if config.run.teacher and config.train.loss not in SOFTMAXES:
        raise ConfigError(f"--teacher goes with --loss {' or '.join(SOFTMAXES)}, got {config.train.loss!r}")


def require_discountable(config: Config) -> None:
    """Raise ConfigError where there is no teacher to discount, or targets would be discounted with the others."""
    if (discount := config.train.settled_discount) and not (config.run.teacher and config.train.loss == "filtered"):
        raise ConfigError(
            f"--settled-discount {discount:g} goes with a --teacher and --loss filtered, got {config.train.loss!r} "
            f"{'with' if config.run.teacher else 'without'} a teacher"
        )


def require_same_graph(run_dir: Path, facts: dict[str, Any], graph: Graph) -> None:
    """Raise ConfigError where a teacher was trained on another graph."""
    if facts["graph_checksum"] != graph.checksum:
        raise ConfigError(
            f"--teacher {run_dir} was trained on another graph than {graph.path} (checksum "
            f"{facts['graph_checksum'][:20]}, not {graph.checksum[:20]}); train a teacher on this one"
        )


def identify(teachers: list[tuple[Path, Path, dict[str, Any]]]) -> Identity:
    """Say of (run, checkpoint, facts) which they are, and hash the checksums of their files, wherever they are."""
    digest = hashlib.sha256()
    for _, _, facts in teachers:
        digest.update(json.dumps(facts["files"], sort_keys=True).encode())
    runs, folders = [str(run) for run, _, _ in teachers], [folder.name for _, folder, _ in teachers]
    return {"run": ",".join(runs), "checkpoint": ", ".join(folders), "digest": digest.hexdigest()}


def require_same_beginning(before: dict[str, Any] | None, now: Named | None) -> None:
    """Raise ConfigError where a run is to be continued with another --grow-from than it began with, or without it.

    It has no effect any more; but config.toml is to say of a run how it came about.
    """
    if before and not now:
        raise ConfigError(f"this run began with what another has learnt; name it: --grow-from {before['run']}")
    if now and not before:
        raise ConfigError(f"this run began without --grow-from; leave {now.place} away, or use another --out")
    if before and now:
        was, place = Path(before["run"]), now.place
        if was.name != place.name or not (now.own or was == place):  # its own teacher moves with it
            raise ConfigError(f"this run began with what {was} has learnt, not {place}; name that one")


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
