"""What a run is: frozen dataclasses, read from TOML and from the command line, checked where they are built.

A field's metadata holds its help text and its bounds, so the command line, the checks and the documentation agree.
Unknown keys are errors. The resolved config is written into the run directory as config.toml.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

LOCK = "lock"
"""The file by which the directory of a run is known; held while the run trains."""


class UserError(ValueError):
    """What a user can cause and mend, said in one line: the value, the bound, the remedy."""


class StoppedError(RuntimeError):
    """Work that had to stop, said in one line for the user."""

    exit_code = 1


class ConfigError(UserError):
    """A setting that cannot be used."""


def setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Declare a field with its default, its help text and the values it may take."""
    bounds = {"least": least, "most": most, "above": above, "below": below, "choices": choices}
    return field(default=default, metadata={"help": help, **bounds})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, as in the paper; the defaults are its FB15k-237 TwoMult row."""

    decoder: str = setting(
        "twomult",
        "How encoded tokens score an entity; twomult-source reads the source token (the paper's ablation).",
        choices=("twomult", "twomult-source", "tucker"),
    )
    dim: int = setting(100, "Width of every embedding (the paper's d).", least=1)
    num_heads: int = setting(64, "Attention heads.", least=1)
    dim_key: int = setting(32, "Width of a head's queries and keys (d_k).", least=1)
    dim_value: int = setting(50, "Width of a head's values (d_v).", least=1)
    dim_hidden: int = setting(2048, "Width of the feed-forward layer (d_h).", least=1)
    dropout_input: float = setting(0.4, "Dropout on the two input tokens (do_enc).", least=0, most=0.99)
    dropout_attention: float = setting(0.1, "Dropout on the attention weights (do_sdp).", least=0, most=0.99)
    dropout_output: float = setting(0.3, "Dropout after the attention (do_mha).", least=0, most=0.99)
    dropout_hidden: float = setting(0.2, "Dropout after the feed-forward layer (do_pff).", least=0, most=0.99)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training; with the model, the graph and the seed it decides every number of a run."""

    loss: str = setting(
        "softmax",
        "1-N loss: bce (the paper), kvsall (bce with one example per query), softmax, or filtered (softmax of each "
        "target among the entities that are no other target of its query).",
        choices=("bce", "kvsall", "softmax", "filtered"),
    )
    label_smoothing: float = setting(0.0, "Label smoothing (the paper: 0.1 with bce).", least=0, below=1)
    weight_power: float = setting(
        1.0,
        "A query of k targets weighs k to this power; 1: triples weigh the same (the paper), 0: queries, as in kvsall.",
        least=0,
        most=1,
    )
    batch_size: int = setting(512, "Queries per step, over all processes together.", least=1)
    epochs: int = setting(60, "Passes over all training queries.", least=1)
    learning_rate: float = setting(0.003, "Adam's learning rate, at its peak.", above=0)
    schedule: str = setting(
        "cosine",
        "Learning rate: cosine to zero, decay by a factor (the paper), or constant; all after the warm-up.",
        choices=("cosine", "decay", "constant"),
    )
    warmup_epochs: float = setting(1.0, "Epochs of linear warm-up from zero.", least=0)
    decay_factor: float = setting(0.995, "decay: factor per two epochs.", above=0, most=1)
    decay_until: int = setting(1050, "decay: epoch after which the rate stays.", least=0)
    weight_decay: float = setting(
        0.0,
        "Decoupled weight decay of the entity vectors: each step takes rate times this off them.",
        least=0,
        most=100,
    )
    hearsay: float = setting(
        0.0,
        "Chance of a query to draw one of its source's facts and, where it is of another relation than the query's, to "
        "take for the source not its own vector, which has learnt the answer, but what that neighbour's query says.",
        least=0,
        most=1,
    )
    teacher_weight: float = setting(
        1.0, "How much the word of a --teacher on the other candidates counts beside the targets.", least=0, most=100
    )
    settled_discount: float = setting(
        0.0,
        "filtered: how many times the log odds that a new fact is its entity's first (counted in train, for each "
        "relation; none where below even) are taken off a --teacher's scores of entities that have such a fact.",
        least=0,
        most=100,
    )
    seed: int = setting(0, "Seed of every random choice.", least=0, most=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation during training, and the report at its end."""

    eval_every: int = setting(10, "Epochs between evaluations on valid (0: never).", least=0)
    patience: int = setting(
        0, "Evaluations on valid without a better MRR after which training stops (0: train all epochs).", least=0
    )
    ties: str = setting(
        "random",
        "Position of a true target among candidates of equal score.",
        choices=("random", "mean", "optimistic", "pessimistic"),
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a run is carried out; but for other runs it learns from, nothing here changes numbers beyond rounding."""

    graph: str = setting("", "Graph directory made by sattle-ingest [default: the built-in family graph].")
    dataset: str = setting(
        "", "Benchmark to train where no graph is named: FB15k-237 or WN18RR, put into the cache on first use."
    )
    out: str = setting("", "Run directory [default: runs/GRAPH-DATE-TIME].")
    nproc: int = setting(
        0, "Processes on this machine [default: one per GPU, else one; under torchrun: its own].", least=0
    )
    device: str = setting("auto", "Where to compute.", choices=("auto", "cpu", "cuda"))
    tensorboard: str = setting(
        "off",
        "Write TensorBoard event files to RUN/tensorboard too (needs the extra `tensorboard`).",
        choices=("off", "on"),
    )
    precision: str = setting(
        "float32", "Arithmetic of the matrix products; their sums are formed in float32.", choices=("float32", "bf16")
    )
    threads: int = setting(0, "Threads per process [default: cores / processes].", least=0, most=1024)
    score_memory: int = setting(
        0, "MiB for the score buffer of a process [default: 64 on CPU, 1024 on a GPU].", least=0
    )
    timeout: float = setting(
        10.0, "Minutes after which a process that waits for a dead or hung one gives up.", above=0, most=1e6
    )
    save_every: int = setting(
        10, "Epochs between checkpoints (the best epoch by validation MRR and the last are always saved).", least=1
    )
    save_minutes: float = setting(
        15.0, "Minutes after which a checkpoint is written in the middle of an epoch too.", above=0, most=1e6
    )
    saving: str = setting(
        "background",
        "Write checkpoints in the background, from a copy in host memory, or blocking, without that copy.",
        choices=("background", "blocking"),
    )
    keep: int = setting(2, "Newest checkpoints to keep; the best is kept besides.", least=1)
    resume: str = setting(
        "auto",
        "Checkpoint to continue from: auto (the newest that is whole, if there is any), latest (it must be there and "
        "whole), or a name such as epoch-00010.",
    )
    grow_from: str = setting(
        "",
        "Begin with what this run has learnt; its graph may have grown since by sattle-ingest --append-to. "
        "Or a recipe that --teacher names: with what that teacher has learnt.",
    )
    teacher: str = setting(
        "",
        "Learn from the scores of this run besides: it must be of the same graph, its model may be another "
        "(losses softmax and filtered). Or a recipe: it is trained first, in RUN/teacher-1. Or several of these, "
        "separated by commas: from the mean of their scores.",
    )
    max_restarts: int = setting(
        0, "How often to start all processes again, from the last checkpoint, when one has failed.", least=0
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """All of it; the sections are the tables of the TOML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def override(self, values: Mapping[str, Any], origin: str) -> Config:
        """Replace single settings, named without their section (field names are unique)."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            sections.setdefault(section_of(name), {})[name] = value
        return self.merge(sections, origin)

    def merge(self, sections: Mapping[str, Any], origin: str) -> Config:
        """Replace the settings given as {section: {name: value}}; `origin` is named in errors."""
        changed = {}
        known = {f.name: f for f in dataclasses.fields(self)}
        for section, values in sections.items():
            if section not in known and section in {f.name for _, f in settings()}:
                raise ConfigError(f"{origin}: {section} belongs in the section [{section_of(section)}]")
            if section not in known:
                raise ConfigError(f"{origin}: unknown section [{section}]; known are {_list(known)}")
            if not isinstance(values, Mapping):
                raise ConfigError(f"{origin}: [{section}] must be a table, got {values!r}")
            changed[section] = _replace(getattr(self, section), values, origin)
        return dataclasses.replace(self, **changed)


def load_toml(path: Path, base: Config) -> Config:
    """Read a TOML file over a base config."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return base.merge(values, str(path))


def recipe_names() -> list[str]:
    """List the recipes shipped with the package."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in resources.files("sattle_dist").joinpath("recipes").iterdir()
        if entry.name.endswith(".toml")
    )


def load_recipe(name: str) -> Config:
    """Read a recipe over the defaults."""
    with resources.as_file(resources.files("sattle_dist") / "recipes" / f"{name}.toml") as path:
        return load_toml(path, Config())


def to_toml(config: Config) -> str:
    """Write a config as TOML, with every setting spelled out."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        values = getattr(config, section.name)
        lines += [f"{f.name} = {_toml_value(getattr(values, f.name))}" for f in dataclasses.fields(values)]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        if any(0xD800 <= ord(c) < 0xE000 for c in value):
            raise ConfigError(f"{value!r} is not valid UTF-8; use another name")
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)


def settings() -> list[tuple[str, dataclasses.Field[Any]]]:
    """List (section, field) of every setting."""
    sections = typing.get_type_hints(Config)
    return [(section, f) for section, kind in sections.items() for f in dataclasses.fields(kind)]


def section_of(name: str) -> str:
    """Give the section that holds this setting."""
    return next(section for section, f in settings() if f.name == name)


def field_type(section: str, name: str) -> type:
    """Give the plain type (int, float or str) of a setting."""
    hint = typing.get_type_hints(typing.get_type_hints(Config)[section])[name]
    assert not isinstance(hint, types.UnionType)
    return typing.cast(type, hint)


def _replace(section: Any, values: Mapping[str, Any], origin: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(section)}
    hints = typing.get_type_hints(type(section))
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{origin}: unknown setting {name!r}; known are {_list(known)}")
        checked[name] = check_value(value, hints[name], known[name], f"{origin}: {name}")
    return dataclasses.replace(section, **checked)


def check_value(value: Any, kind: type, declared: dataclasses.Field[Any], where: str) -> Any:
    """Give the value as this field's type, or raise ConfigError with the value, the bound and the place."""
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} must be {_KIND[kind]}, got {value!r}")
    bounds = declared.metadata
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} must be finite, got {value!r}")
    if isinstance(value, int) and value > (bounds["most"] or 2**31 - 1):
        raise ConfigError(f"{where} must be at most {bounds['most'] or 2**31 - 1}, got {value!r}")
    if (choices := bounds["choices"]) is not None and value not in choices:
        raise ConfigError(f"{where} must be one of {_list(choices)}, got {value!r}")
    for name, (words, fails) in _BOUNDS.items():
        if bounds[name] is not None and fails(value, bounds[name]):
            raise ConfigError(f"{where} must be {words} {bounds[name]}, got {value!r}")
    return value


_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("at least", operator.lt),
    "most": ("at most", operator.gt),
    "above": ("greater than", operator.le),
    "below": ("less than", operator.ge),
}


_KIND: dict[type, str] = {int: "a whole number", float: "a number", str: "a string"}


def _list(names: typing.Iterable[str]) -> str:
    return ", ".join(names)
