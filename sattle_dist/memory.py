"""Whether a run fits: the memory it needs, the memory there is, what would help, and the refusal of what cannot fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sattle_dist import costs, teacher
from sattle_dist.collectives import Group
from sattle_dist.config import Config, ConfigError, ModelConfig, load_recipe, load_toml, recipe_names
from sattle_dist.costs import Workload
from sattle_dist.graph import Graph
from sattle_dist.learner import MIB
from sattle_dist.runtime import Place
from sattle_dist.units import size_text

MOST_DEVICES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What the processes run on: the memory of each, or of all together where they share one machine's."""

    memory: int
    shared: bool
    name: str


def memory_peaks(work: Workload) -> dict[str, int]:
    """Give the bytes of one process on its device as it trains, evaluates and saves."""
    parts = costs.memory_parts(work)
    training = sum(parts.values())
    between = training - parts["activations of the encoder"] - parts["query vectors"]
    evaluating = between + costs.evaluation_bytes(work)
    if work.cuda:
        return {"training": training, "evaluating": evaluating}
    # A checkpoint's copy is in the memory of the host, and stays there for the next.
    copy = costs.saving_bytes(work)
    return {"training": training, "evaluating": evaluating + copy, "saving": training + copy}


def fits(work: Workload, devices: Devices) -> bool:
    """Tell whether the peak of every process fits its device's memory, or all of them the machine's."""
    processes = work.world_size if devices.shared else 1
    return processes * max(memory_peaks(work).values()) <= devices.memory


def smallest_number(work: Workload, memory: int) -> int | None:
    """Give the smallest number of devices with so much memory each on which the run fits."""
    most = min(work.num_entities, MOST_DEVICES)
    return smallest(lambda n: max(memory_peaks(replace(work, world_size=n)).values()) <= memory, most)


def smallest(holds: Callable[[int], bool], most: int) -> int | None:
    """Give the smallest n in [1, most] for which it holds, given that it then holds for larger n too."""
    high = 1
    while not holds(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = high // 2  # fails, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def with_setting(work: Workload, name: str, value: int | str) -> Workload:
    """Give the workload with another --dim, --saving ..."""
    return replace(work, config=work.config.override({name: value}, "plan"))


def remedies(work: Workload, fitting: Callable[[Workload], bool], more: str) -> str:
    """List what would make it fit: more devices, in words, and smaller settings."""
    found = [f"at least {more}"] if more else []
    if fitting(with_setting(work, "saving", "blocking")):
        found.append("--saving blocking")
    values = {
        "dim": (work.config.model.dim, 1),
        "batch_size": (work.config.train.batch_size, work.world_size),
        "score_memory": (work.score_budget // MIB, 1),
    }
    for name, (value, least) in values.items():
        halvings = [value >> i for i in range(1, 32) if value >> i >= least]
        if best := next((n for n in halvings if fitting(with_setting(work, name, n))), None):
            found.append(f"--{name.replace('_', '-')} {best}")
    return f"use {', or '.join(found)}" if found else "use devices with more memory: no smaller setting fits"


def require_fits(config: Config, graph: Graph, group: Group, device: torch.device) -> None:
    """Raise ConfigError, on every rank, where the memory that is left cannot hold the run. Every rank must call it.

    Only what must exist at the same time is counted, and only against what is free now, so nothing is refused that
    would fit. All ranks ask before any of them makes something.
    """
    index = graph.index("train")
    work = Workload(
        config=config,
        num_entities=graph.num_entities,
        num_relations=graph.num_relations,
        num_triples=graph.num_triples["train"],
        num_queries=len(index),
        world_size=group.world_size,
        cuda=device.type == "cuda",
        num_evaluated=most_evaluated(graph),
        teachers=teacher_models(config),
    )
    problems = group.gather_objects(find_problem(work, Place.from_environment().local_world_size, device))
    if problem := next(filter(None, problems), ""):
        raise ConfigError(problem)


def most_evaluated(graph: Graph) -> int:
    """Count the triples of the larger of the splits that a run evaluates."""
    return max(graph.num_triples["valid"], graph.num_triples["test"])


def teacher_models(config: Config) -> tuple[ModelConfig, ...]:
    """Read which models the teachers have that a config names; none, if one is unreadable: it is refused elsewhere."""
    recipes, given = recipe_names(), teacher.names(config)
    try:
        return tuple(
            (load_recipe(name) if name in recipes else load_toml(Path(name) / "config.toml", Config())).model
            for name in given
        )
    except ConfigError:
        return ()


def find_problem(work: Workload, num_local: int, device: torch.device) -> str:
    """Say in one line why the run cannot fit this process's device or this machine; nothing where it can."""
    free = available_memory()

    def on_host(work: Workload) -> bool:
        return num_local * certain_bytes(work, device="cpu") <= free

    if not on_host(work):
        need = certain_bytes(work, device="cpu")
        each = f" ({num_local} processes of {size_text(need)})" if num_local > 1 else ""
        most = min(work.num_entities, MOST_DEVICES) // num_local
        machines = smallest(lambda n: on_host(replace(work, world_size=n * num_local)), most)
        more = f"{machines:,} machines like this one (docs/distributed.md)" if machines else ""
        return (
            f"training needs at least {size_text(num_local * need)} of memory on this machine{each}, "
            f"{size_text(free)} are free; {remedies(work, on_host, more)}"
        )
    if device.type != "cuda":
        return ""
    free_on_gpu: int = torch.cuda.mem_get_info(device)[0]

    def on_gpu(work: Workload) -> bool:
        return certain_bytes(work, device="cuda") <= free_on_gpu

    if on_gpu(work):
        return ""
    gpus = smallest(lambda n: on_gpu(replace(work, world_size=n)), min(work.num_entities, MOST_DEVICES))
    return (
        f"training needs at least {size_text(certain_bytes(work, device='cuda'))} on each of {work.world_size} GPUs, "
        f"{size_text(free_on_gpu)} are free; {remedies(work, on_gpu, f'{gpus:,} GPUs' if gpus else '')}"
    )


def certain_bytes(work: Workload, *, device: str) -> int:
    """Count the bytes of one process on the host or the GPU that are certain to be needed at one time."""
    parts = costs.memory_parts(work)
    state = sum(parts[name] for name in costs.STATE) + parts["score buffer"]
    saving = costs.saving_bytes(work)
    if work.cuda:
        return state if device == "cuda" else saving
    return state + saving


def available_memory() -> int:
    """Give the bytes this machine, or this container, can still hand out, swap included."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):  # not Linux: nothing is known, so nothing is refused
        return 1 << 62
    return min(free, *container_memory(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")))


def container_memory(root: Path, membership: Path) -> list[int]:
    """List what is left below each memory limit of this process's control groups, of version 2 and 1."""
    found = [1 << 62]
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except (OSError, ValueError):
        return found
    for _, controllers, path in lines:
        if controllers == "":
            folder, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = folder / path.lstrip("/")
        # A container often sees its own group as the root, whatever its path is called outside.
        for place in {folder, *(p for p in (inner, *inner.parents) if p.is_relative_to(folder))}:
            try:
                limit, used = (int((place / name).read_text()) for name in names)
                cached = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                kinds = (cached.get(f"total_{kind}", cached.get(kind, 0)) for kind in ("inactive_file", "active_file"))
                found.append(limit - used + sum(int(kind) for kind in kinds))
            except (OSError, ValueError):  # no such group, or no limit ("max")
                continue
    return found
