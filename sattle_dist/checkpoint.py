"""Checkpoints: torch.distributed.checkpoint in safetensors files, the table as row-sharded DTensors.

    RUN/checkpoints/epoch-00010/shard-*.safetensors     every rank's own rows; what is replicated, once
    RUN/checkpoints/epoch-00010/state.json              where the run stood, its config and metrics; the files above
    RUN/checkpoints/epoch-00010-step-0000120/           10 epochs and 120 steps of the next
    RUN/checkpoints/latest, best                        links to the newest, and to the best by validation MRR

Every rank writes and reads its own rows, and any number of ranks reads what any other number wrote. `storage.py` has
the files, `saver.py` the writing while training goes on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sattle_dist.learner import Learner
from sattle_dist.selection import Record, best_record
from sattle_dist.storage import (
    PARTIAL,
    CheckpointError,
    DamagedCheckpoint,
    read_facts,
    verify,
)

__all__ = ["CheckpointError", "DamagedCheckpoint", "latest", "list_checkpoints", "load", "read_facts", "verify"]

NAME = re.compile(r"epoch-(\d{5,})(?:-step-(\d{7,}))?")
ASIDE, REMOVED = ".aside", ".removed"


def name_of(epoch: int, step: int) -> str:
    """Name the checkpoint after `epoch` whole epochs and `step` steps of the next."""
    return f"epoch-{epoch:05d}" + (f"-step-{step:07d}" if step else "")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """List the checkpoints of a run, oldest first; whether they are whole is for `verify` to say."""
    found = {}
    for folder in (run_dir / "checkpoints").glob("epoch-*"):
        if match := NAME.fullmatch(folder.name):
            found[int(match[1]), int(match[2] or 0)] = folder
    return [found[place] for place in sorted(found)]


def latest(run_dir: Path) -> Path:
    """Give the newest checkpoint of a run."""
    if (run_dir / "manifest.json").is_file():
        raise CheckpointError(f"{run_dir} is a graph, not a run; `sattle train --graph {run_dir} --out RUN` makes one")
    if os.path.isfile(run_dir):
        raise CheckpointError(f"{run_dir} is a file, not the directory of a run")
    if not os.path.isdir(run_dir):
        raise CheckpointError(f"no run at {run_dir}; train one with `sattle train --out {run_dir}`")
    if not (found := list_checkpoints(run_dir)):
        raise CheckpointError(f"{run_dir} holds no checkpoint yet; train it with `sattle train --out {run_dir}`")
    return found[-1]


def best(run_dir: Path) -> Path | None:
    """Give the checkpoint of the best validation MRR so far, as the newest checkpoint tells."""
    record = best_saved(run_dir, read_facts(latest(run_dir))["history"])
    return run_dir / "checkpoints" / name_of(record["epoch"], 0) if record else None


def best_saved(run_dir: Path, history: Sequence[Record]) -> Record | None:
    """Give the epoch of the highest validation MRR among those whose checkpoint is there."""
    kept = [record for record in history if (run_dir / "checkpoints" / name_of(record["epoch"], 0)).is_dir()]
    return best_record(kept)


def find(run_dir: Path, which: str) -> Path:
    """Give the checkpoint called `latest`, `best` (the newest where none is best), or by its name."""
    newest = latest(run_dir)
    if which == "latest":
        return newest
    if which == "best":
        try:
            return best(run_dir) or newest
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{error}; {others(run_dir, newest)}") from None
    if (folder := run_dir / "checkpoints" / which) in (known := list_checkpoints(run_dir)):
        return folder
    raise CheckpointError(f"{run_dir} holds no checkpoint {which!r}; it holds {', '.join(c.name for c in known)}")


def others(run_dir: Path, refused: Path) -> str:
    """Offer the other checkpoints of a run to a user to whom one of them was refused."""
    names = [folder.name for folder in reversed(list_checkpoints(run_dir)) if folder != refused]
    if not names:
        return "the run has no other checkpoint"
    return f"`--checkpoint NAME` of sattle eval, predict, export and report opens another: {', '.join(names)}"


def local_tensors(learner: Learner, *, with_optimizer: bool) -> dict[str, Tensor]:
    """Name every tensor of a learner's state on this rank: what is replicated, and this rank's rows of the table."""
    tensors: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in learner.model.state_dict().items()}
    for name, parameter in learner.named_parameters():
        if name.startswith("table."):
            tensors[name] = parameter.detach()
        if with_optimizer:
            for key, tensor in optimizer_state(learner, parameter).items():
                tensors[f"optimizer.{name}.{key}"] = tensor
    return tensors


def is_sharded(name: str, tensor: Tensor) -> bool:
    """Tell whether a tensor holds this rank's rows of the table, or of its optimizer state."""
    return name.startswith(("table.", "optimizer.table.")) and tensor.dim() > 0


def as_state(tensors: dict[str, Tensor], num_entities: int, world_size: int) -> dict[str, Tensor]:
    """Make DTensors, over the same memory, of the tensors that hold this rank's rows."""

    def sharded(local: Tensor) -> Tensor:
        shape = (num_entities, *local.shape[1:])
        stride = (local.shape[1], 1) if local.dim() == 2 else (1,)
        mesh = process_mesh(local.device.type, world_size)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    return {name: sharded(tensor) if is_sharded(name, tensor) else tensor for name, tensor in tensors.items()}


@functools.cache
def process_mesh(device: str, world_size: int) -> DeviceMesh:
    """Make the one-dimensional mesh of all processes, once."""
    return init_device_mesh(device, (world_size,))


def optimizer_state(learner: Learner, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    """Give Adam's state of a parameter, made as Adam makes it if there was no step yet."""
    state: dict[str, Tensor] = learner.optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    return state


def load(
    learner: Learner, checkpoint: Path, *, with_optimizer: bool, facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Read a checkpoint into a learner of any number of ranks, and give its facts. Every rank must call it.

    Every byte is checked first, unless its facts are given because that was done.
    """
    facts = facts or verify(checkpoint, learner.group)
    tensors = local_tensors(learner, with_optimizer=with_optimizer)
    state = as_state(tensors, learner.sharding.num_entities, learner.group.world_size)
    try:
        with warnings.catch_warnings(), without_torch_log():
            warnings.simplefilter("ignore")  # torch warns that this part of it may change
            load_distributed(state, storage_reader=HuggingFaceStorageReader(str(checkpoint)))
    except (CheckpointException, OSError, ValueError, KeyError, AssertionError) as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {reason_of(error)}") from None
    return facts


@contextlib.contextmanager
def without_torch_log() -> Iterator[None]:
    """Keep torch from logging, with a traceback, what it raises besides: it does so as the root logger."""
    root = logging.getLogger()

    def is_from_elsewhere(record: logging.LogRecord) -> bool:
        return record.module != "state_dict_loader"

    root.addFilter(is_from_elsewhere)
    try:
        yield
    finally:
        root.removeFilter(is_from_elsewhere)


def reason_of(error: BaseException) -> str:
    """Give the first line of what went wrong; a CheckpointException holds it for each rank."""
    first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return (str(first) or type(first).__name__).splitlines()[0]


def tidy(run_dir: Path, keep: int, history: Sequence[Record]) -> None:
    """Point `latest` and `best` to their checkpoints, and remove what is neither best nor among the `keep` newest."""
    found, best_of = list_checkpoints(run_dir), best_saved(run_dir, history)
    best_name = name_of(best_of["epoch"], 0) if best_of else ""
    for name, target in (("latest", found[-1].name if found else ""), ("best", best_name)):
        point(run_dir / "checkpoints" / name, target)
    for old in found[:-keep]:
        if old.name != best_name:
            removed = old.with_name(old.name + REMOVED)  # so that half a checkpoint never has a checkpoint's name
            with contextlib.suppress(OSError):
                os.rename(old, removed)
    for folder in (run_dir / "checkpoints").glob(f"*{REMOVED}"):
        shutil.rmtree(folder, ignore_errors=True)


def point(link: Path, target: str) -> None:
    """Let a link point to a checkpoint, all at once; file systems without links do without."""
    with contextlib.suppress(OSError):
        if not target or not link.with_name(target).is_dir():
            link.unlink(missing_ok=True)
            return
        draft = link.with_name(link.name + ".draft")
        draft.unlink(missing_ok=True)
        draft.symlink_to(target)
        os.replace(draft, link)


def set_aside(checkpoints: list[Path]) -> None:
    """Rename checkpoints so that the run no longer counts them; nothing is deleted but what was set aside before."""
    for folder in checkpoints:
        aside = folder.with_name(folder.name + ASIDE)
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rename(folder, aside)


def remove_leftovers(run_dir: Path) -> None:
    """Remove what a run that was killed while it saved has left."""
    for pattern in (f"epoch-*{PARTIAL}", f"epoch-*{REMOVED}"):
        for folder in (run_dir / "checkpoints").glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
