"""TensorBoard event files beside metrics.jsonl: RUN/tensorboard, one point per epoch and metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sattle_dist.config import ConfigError

FOLDER = "tensorboard"


def check_tensorboard() -> None:
    """Raise ConfigError where TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "--tensorboard on needs the package tensorboard; install it with `pip install 'sattle-dist[tensorboard]'`, "
            "or leave the option away (metrics.jsonl is always written)"
        )


def log_epoch(record: Mapping[str, Any], run_dir: Path) -> None:
    """Write the numbers of an epoch's record, and make sure they are seen now.

    A resumed run takes the place of the epochs that it repeats.
    """
    epoch = record["epoch"]
    writer = _open_writer(run_dir, epoch)
    for name, value in scalars(record):
        if name != "epoch":
            writer.add_scalar(name, value, epoch)
    writer.flush()


def _open_writer(run_dir: Path, epoch: int) -> Any:
    """Open the event file of this process when it logs its first epoch."""
    if run_dir not in _writers:
        check_tensorboard()
        # By name, as its types are known only where TensorBoard is installed.
        kind: Any = import_module("torch.utils.tensorboard").SummaryWriter
        # Epochs that were trained after the checkpoint, and are trained again, are taken out of the curves.
        purge = {"purge_step": epoch} if epoch > 1 else {}
        _writers[run_dir] = kind(str(run_dir / FOLDER), **purge)
    return _writers[run_dir]


_writers: dict[Path, Any] = {}


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Give the numbers of a record, those of its parts as part/name."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)
