"""Choosing the checkpoint that a run continues from: the newest that is whole, or the one that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sattle_dist.checkpoint import find, list_checkpoints, remove_leftovers, set_aside
from sattle_dist.collectives import Group
from sattle_dist.progress import show
from sattle_dist.storage import CheckpointError, DamagedCheckpoint, verify

Facts = dict[str, Any]


def choose(run_dir: Path, wanted: str, group: Group) -> tuple[Path, Facts] | None:
    """Give the checkpoint to continue from and its facts, every byte checked; None for a new run.

    `wanted` is the setting --resume. Rank 0's view of the folder decides: a file may show later on another machine.
    Every rank must call it.
    """
    names: list[str] = []
    problem = ""
    if group.rank == 0:
        remove_leftovers(run_dir)
        names = [folder.name for folder in list_checkpoints(run_dir)]
        try:
            if wanted != "auto":
                names = names[: names.index(find(run_dir, wanted).name) + 1]
        except CheckpointError as error:
            problem = str(error)
    names, problem = group.share((names, problem))
    if problem:
        raise CheckpointError(problem)
    folders = [run_dir / "checkpoints" / name for name in names]
    found = newest_whole(folders, group) if wanted == "auto" else asked_for(folders, group)
    if found and group.rank == 0:
        known = list_checkpoints(run_dir)
        set_aside(known[known.index(found[0]) + 1 :])
    group.barrier()
    return found


def newest_whole(folders: list[Path], group: Group) -> tuple[Path, Facts] | None:
    """Go back, from the newest, to a checkpoint that is whole; say loudly which ones are not."""
    damage = ""
    for folder in reversed(folders):
        try:
            facts = verify(folder, group)
        except DamagedCheckpoint as error:
            damage = damage or str(error)
            if group.rank == 0:
                show(f"warning: {error}; it is set aside, and the checkpoint before it is tried", err=True)
            continue
        return folder, facts
    if damage:
        raise CheckpointError(f"{damage}; no whole checkpoint is left, begin a new run with another --out")
    return None


def asked_for(folders: list[Path], group: Group) -> tuple[Path, Facts]:
    """Take the last of the checkpoints; where it is damaged, offer the one before."""
    *earlier, folder = folders
    try:
        return folder, verify(folder, group)
    except DamagedCheckpoint as error:
        offer = f"`--resume {earlier[-1].name}` continues from the one before" if earlier else "there is none before it"
        raise DamagedCheckpoint(f"{error}; {offer}") from None
