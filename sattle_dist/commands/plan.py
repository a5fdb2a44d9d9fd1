"""`sattle plan`: what a run will need, before it is paid for."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sattle_dist.commands.errors import one_line_errors
from sattle_dist.commands.options import setting_option
from sattle_dist.commands.train import resolve_config
from sattle_dist.config import ConfigError, recipe_names, settings

if TYPE_CHECKING:
    from sattle_dist.config import Config
    from sattle_dist.costs import Workload
    from sattle_dist.plan import Plan

RUN_SETTINGS = ("device", "threads", "score_memory", "saving", "keep", "teacher")
PROCESSES_A_CORE = 8  # that are started here to be timed, at most
TRAIN_SETTINGS = ("loss", "batch_size", "hearsay", "settled_discount")


def planned_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `sattle train` that decide what a run needs."""
    for section, declared in reversed(settings()):
        if section == "model" or declared.name in TRAIN_SETTINGS + RUN_SETTINGS:
            aliases = ("--heads",) if declared.name == "num_heads" else ()
            command = setting_option(declared.name, *aliases, with_default=False)(command)
    return command


@click.command()
@click.argument("graph", required=False, type=click.Path(path_type=Path))
@click.option("--entities", help="Entities, instead of a graph: 90M, 14541.")
@click.option("--relations", help="Relations, without their inverses.")
@click.option("--triples", help="Training triples.")
@click.option("--queries", help="Distinct (source, relation) pairs, inverses included.  [default: as many as triples]")
@click.option(
    "--devices", default=1, show_default=True, type=click.IntRange(1, 1 << 20), help="Processes, one a device."
)
@click.option("--device-memory", help="Memory of each device: 80GB, 24GiB.  [default: that of this machine]")
@click.option("--device-flops", help="Peak FLOP/s of each device: 19.5T.  [default: this machine is timed]")
@click.option("--memory-bandwidth", help="Bytes/s of each device's memory: 2TB.  [default: 0.1 byte per FLOP]")
@click.option("--bandwidth", help="Bytes/s each device can send: 25GB.  [default: measured here, or 12.5GB]")
@click.option("--recipe", type=click.Choice(recipe_names()), help="Settings shipped with the package.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Settings in a TOML file.")
@click.option("--json", "as_json", is_flag=True, help="Write the plan as JSON.")
@planned_settings
@one_line_errors
def plan(
    graph: Path | None,
    devices: int,
    recipe: str | None,
    file: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Tell what training a graph will need: memory, devices, traffic, time.

    The graph is a directory made by sattle-ingest, or only its counts. Without figures of a device, this machine is
    timed for a few seconds, and --devices counts processes that share it.

    \b
      sattle plan my.graph                                       here, in one process
      sattle plan my.graph --devices 4                           here, in four
      sattle plan --entities 90M --relations 1300 --triples 600M \\
        --devices 16 --device-memory 80GB --device-flops 19.5T --memory-bandwidth 2TB --bandwidth 25GB
    """
    from sattle_dist.runtime import end_process

    names = {declared.name for _, declared in settings()}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    config = resolve_config(recipe, file, given)
    work, assumptions = workload(graph, options, devices, config)
    made = plan_for(work, options, assumptions)
    click.echo(json.dumps(made.as_dict(), indent=2) if as_json else render(made))
    end_process(0)


def workload(graph: Path | None, options: dict[str, Any], devices: int, config: Config) -> tuple[Workload, list[str]]:
    """Read the sizes from a graph or from the options."""
    from sattle_dist.costs import Workload
    from sattle_dist.graph import Graph
    from sattle_dist.memory import most_evaluated, teacher_models
    from sattle_dist.teacher import names, require_discountable, require_teachable
    from sattle_dist.units import parse_count

    require_teachable(config)
    require_discountable(config)
    counts = {name: options[name] for name in ("entities", "relations", "triples", "queries") if options[name]}
    assumptions, given = [], dict(counts)
    if graph is None and not counts and config.run.graph:
        graph = Path(config.run.graph)
    if graph is not None:
        if counts:
            raise ConfigError(f"--{next(iter(counts))} is given with the graph {graph}; leave one of them away")
        opened = Graph.open(graph)
        sizes = [opened.num_entities, opened.num_relations, opened.num_triples["train"], len(opened.index("train"))]
        num_evaluated = most_evaluated(opened)
        if not sizes[2]:
            raise ConfigError(f"{graph} has no training triples")
    else:
        if missing := [name for name in ("entities", "relations", "triples") if name not in counts]:
            raise ConfigError(f"--{missing[0]} is missing; give a graph, or --entities, --relations and --triples")
        if "queries" not in counts:
            counts["queries"] = counts["triples"]
            assumptions.append(
                "as many queries as triples (--queries), that is two targets a query; FB15k-237 has 3.6, WN18RR 1.7"
            )
        num_evaluated = 0
        sizes = [parse_count(counts[name], f"--{name}") for name in ("entities", "relations", "triples", "queries")]
        if sizes[3] > 2 * sizes[2]:
            raise ConfigError(f"--queries must be at most two per triple ({2 * sizes[2]:,}), got {sizes[3]:,}")
    if devices > sizes[0]:
        raise ConfigError(f"--devices must be at most the number of entities ({sizes[0]:,}), got {devices:,}")
    work = Workload(
        config=config,
        num_entities=sizes[0],
        num_relations=sizes[1],
        num_triples=sizes[2],
        num_queries=sizes[3],
        world_size=devices,
        cuda=uses_cuda(config, options),
        num_evaluated=num_evaluated,
        teachers=teacher_models(config),
    )
    sizes_again = shlex.quote(str(graph)) if graph else " ".join(f"--{name} {value}" for name, value in given.items())
    assumptions += [
        f"the teacher {name} is trained before; `sattle plan {sizes_again} --recipe {name}` plans that"
        for name in dict.fromkeys(names(config))
        if name in recipe_names()
    ]
    if config.run.teacher and not work.teachers:
        raise ConfigError(f"--teacher {config.run.teacher} is no run: it has no readable config.toml")
    return work, assumptions


def uses_cuda(config: Config, options: dict[str, Any]) -> bool:
    """Tell whether the devices are GPUs: asked for, or found here, or described by figures."""
    import torch

    if config.run.device != "auto":
        return config.run.device == "cuda"
    return torch.cuda.is_available() or bool(options["device_flops"])


def plan_for(work: Workload, options: dict[str, Any], assumptions: list[str]) -> Plan:
    """Plan a workload on the devices that the options describe, or on this machine."""
    from dataclasses import replace

    import torch

    from sattle_dist.calibrate import calibrate
    from sattle_dist.memory import Devices, available_memory
    from sattle_dist.plan import DEFAULT_LATENCY, DEFAULT_LINK, given_speed, make_plan
    from sattle_dist.runtime import num_cores
    from sattle_dist.units import COUNTS, SIZES, parse_number, size_text

    def figure(name: str, units: dict[str, int], example: str) -> float:
        text = options[name]
        return parse_number(text, units, f"--{name.replace('_', '-')}", example) if text else 0.0

    memory, link = figure("device_memory", SIZES, "80GB"), figure("bandwidth", SIZES, "25GB")
    flops, memory_bandwidth = figure("device_flops", COUNTS, "19.5T"), figure("memory_bandwidth", SIZES, "2TB")
    if memory_bandwidth and not flops:
        raise ConfigError("--memory-bandwidth is given without --device-flops; give both")
    own_cuda = work.cuda and torch.cuda.is_available()
    # Planned for as many processes as this machine can start; with more GPUs than it has, one is timed.
    here = not memory and not flops and not (own_cuda and work.world_size > torch.cuda.device_count())
    if link and here:
        raise ConfigError("--bandwidth is given, but processes here are timed; give --device-memory or --device-flops")
    if memory:
        devices = Devices(memory=int(memory), shared=False, name=f"devices with {size_text(memory)} each")
    elif own_cuda:
        free = torch.cuda.mem_get_info()[0]
        devices = Devices(memory=free, shared=False, name=f"GPUs like this machine's, {size_text(free)} free each")
    else:
        free = available_memory()
        name = f"this machine, {size_text(free)} free" + (" for all processes" if here and work.world_size > 1 else "")
        devices = Devices(memory=free, shared=here, name=name)
    if flops:
        speed, assumed = given_speed(flops, memory_bandwidth, link, cuda=work.cuda)
        if not link and work.world_size > 1:
            assumed.append(f"each device sends {DEFAULT_LINK:.3g} bytes/s (--bandwidth)")
        return make_plan(work, devices, speed, assumptions + assumed)
    if work.cuda and not own_cuda:
        raise ConfigError("--device cuda: there is no GPU here to be timed; give --device-flops")
    if here and work.world_size > PROCESSES_A_CORE * num_cores():
        raise ConfigError(
            f"--devices {work.world_size:,} would start as many processes here, on {num_cores()} cores, to time them; "
            f"at most {PROCESSES_A_CORE * num_cores()} are. Describe the devices with --device-memory or --device-flops"
        )
    speed = calibrate(work, here=here)
    assumptions = [*assumptions, "speed was measured on this machine, just now"]
    if not here:
        assumptions.append("each device is as fast as this machine in one process")
        speed = replace(speed, link=link or DEFAULT_LINK, latency=DEFAULT_LATENCY)
        assumptions.append(f"each device sends {speed.link:.3g} bytes/s, and an exchange waits 20 microseconds")
    return make_plan(work, devices, speed, assumptions)


def render(plan: Plan) -> str:
    """Write a plan for people."""
    from sattle_dist import costs
    from sattle_dist.units import size_text, time_text

    work, model = plan.work, plan.work.config.model
    several = work.world_size > 1
    nfp, efp = work.parameters

    def table(rows: dict[str, str]) -> list[str]:
        return [f"  {name:<38}{value:>14}" for name, value in rows.items()]

    sizes = {name: size_text(n) for name, n in plan.parts.items() if n}
    peaks = {f"peak when {name}": size_text(n) for name, n in plan.peaks.items()}
    host = {"memory of the host": size_text(plan.host)} if plan.host else {}
    fit = "fits" if plan.fits else "DOES NOT FIT"
    smallest = f"{plan.smallest:,}" if plan.smallest else "none"
    disk = {
        "a checkpoint": size_text(costs.checkpoint_bytes(work)),
        f"{costs.num_checkpoints(work)} checkpoints, one being written": size_text(
            costs.num_checkpoints(work) * costs.checkpoint_bytes(work)
        ),
        "training index (mapped, shared)": size_text(costs.index_bytes(work.num_queries, work.num_triples)),
    }
    lines = [
        f"{work.num_entities:,} entities, {work.num_relations:,} relations, {work.num_triples:,} training triples in "
        f"{work.num_queries:,} queries",
        f"{model.decoder}, d={model.dim}, {model.num_heads} heads, {work.config.train.loss} loss, "
        f"{work.config.train.batch_size:,} queries a step; NFP {nfp:,}, EFP {efp:,}",
        f"{work.world_size:,} process{'es' if several else ''} on {plan.devices.name}: {fit}",
        "",
        f"memory of {'each' if several else 'the'} process",
        *table({**sizes, **peaks, **host}),
        *table({"smallest number of devices that fits": smallest}),
        "",
        "on disk",
        *table(disk),
        "",
    ]
    if several:
        total = sum(plan.sent.values())
        sent = {kind: size_text(n) for kind, n in sorted(plan.sent.items(), key=lambda item: -item[1])}
        lines += ["sent by each process in a step", *table({**sent, "all of it": size_text(total)}), ""]
    seconds = {name: time_text(s) for name, s in plan.step.items() if s}
    epoch = {
        "a step": time_text(plan.step_seconds),
        f"an epoch of {work.num_steps:,} steps": time_text(plan.epoch_seconds),
        "operations of an epoch": f"{plan.epoch_flops:.3g} FLOP",
        "queries per second": f"{work.num_queries / plan.epoch_seconds:,.0f}",
    }
    lines += ["time", *table({**seconds, **epoch}), ""]
    lines += [f"assumed: {text}" for text in plan.assumptions]
    lines += [f"warning: {text}" for text in plan.warnings]
    return "\n".join(lines)
