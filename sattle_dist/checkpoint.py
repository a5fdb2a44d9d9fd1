"""Checkpoints: torch.distributed.checkpoint in safetensors files, the table as row-sharded DTensors.

    RUN/checkpoints/epoch-00010/shard-*.safetensors   every rank's own rows; what is replicated, once
    RUN/checkpoints/epoch-00010/state.json            epoch, graph checksum, metrics so far, the files above

Every rank writes and reads its own rows, and any number of ranks reads what any other number wrote. A checkpoint is
written beside its place and renamed when it is whole. No file is ever unpickled.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sattle_dist.config import UserError
from sattle_dist.learner import Learner

KEEP_LAST = 2


class CheckpointError(UserError):
    """A checkpoint that cannot be used."""


def state_of(learner: Learner, *, with_optimizer: bool) -> dict[str, Tensor]:
    """Name every tensor of a learner's state; the table's are DTensors over the same memory."""
    mesh = process_mesh(learner.device.type, learner.group.world_size)
    num_entities = learner.sharding.num_entities

    def sharded(local: Tensor) -> Tensor:
        shape = (num_entities, *local.shape[1:])
        stride = (local.shape[1], 1) if local.dim() == 2 else (1,)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    state: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in learner.model.state_dict().items()}
    for name, parameter in learner.named_parameters():
        is_table = name.startswith("table.")
        if is_table:
            state[name] = sharded(parameter.detach())
        if with_optimizer:
            for key, tensor in optimizer_state(learner, parameter).items():
                state[f"optimizer.{name}.{key}"] = sharded(tensor) if is_table and tensor.dim() else tensor
    return state


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


def save(learner: Learner, run_dir: Path, epoch: int, facts: dict[str, Any]) -> Path:
    """Write the state after `epoch` epochs, with facts to find again beside it. Every rank must call it."""
    folder = run_dir / "checkpoints"
    final, partial = folder / f"epoch-{epoch:05d}", folder / f"epoch-{epoch:05d}.partial"
    if learner.group.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    learner.group.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that DCP may change
        save_distributed(
            state_of(learner, with_optimizer=True),
            storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
        )
    if learner.group.rank == 0:
        files = {file.name: file.stat().st_size for file in partial.iterdir()}
        state = {"epoch": epoch, "files": files, **facts}
        (partial / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        for old in list_checkpoints(run_dir)[:-KEEP_LAST]:
            shutil.rmtree(old, ignore_errors=True)
    learner.group.barrier()
    return final


def load(learner: Learner, checkpoint: Path, *, with_optimizer: bool) -> None:
    """Read a checkpoint into a learner of any number of ranks. Every rank must call it."""
    state = state_of(learner, with_optimizer=with_optimizer)
    # torch takes the rows of a missing file for rows nobody wanted, and would leave them as they are.
    for name, size in read_facts(checkpoint)["files"].items():
        file = checkpoint / name
        if not file.is_file() or file.stat().st_size != size:
            raise CheckpointError(f"{checkpoint} is damaged: {name} is missing or has another size than was written")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_distributed(state, storage_reader=HuggingFaceStorageReader(str(checkpoint)))
    except (CheckpointException, OSError, ValueError, KeyError, AssertionError) as error:
        # A CheckpointException holds what went wrong on each rank.
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = (str(first) or type(first).__name__).splitlines()[0]
        raise CheckpointError(f"{checkpoint} cannot be read: {reason}") from None


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """Read what was saved beside the tensors of a checkpoint."""
    try:
        facts = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        kinds = {"epoch": int, "files": dict, "graph_checksum": str, "history": list}
        if wrong := [name for name, kind in kinds.items() if not isinstance(facts[name], kind)]:
            raise ValueError(f"{wrong[0]} is {facts[wrong[0]]!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint}/state.json is damaged: {error}") from None
    return dict(facts)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """List the whole checkpoints of a run, oldest first."""
    found = [path.parent for path in (run_dir / "checkpoints").glob("epoch-*/state.json")]
    whole = [folder for folder in found if folder.name.removeprefix("epoch-").isdecimal()]
    return sorted(whole, key=lambda folder: int(folder.name.removeprefix("epoch-")))


def latest(run_dir: Path) -> Path:
    """Give the newest checkpoint of a run."""
    if not os.path.isdir(run_dir):
        raise CheckpointError(f"no run at {run_dir}; train one with `sattle train --out {run_dir}`")
    if not (found := list_checkpoints(run_dir)):
        raise CheckpointError(f"{run_dir} holds no checkpoint yet; train it with `sattle train --out {run_dir}`")
    return found[-1]
