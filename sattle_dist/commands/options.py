"""Options that several commands share, and spelling a command out again for the processes it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from sattle_dist.config import field_type, settings

JOB_SETTINGS = ("nproc", "device", "threads", "timeout")


def setting_option(
    name: str, *more_names: str, with_default: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the option of a setting of Config, `--learning-rate` for learning_rate; without default it may be None."""
    section, declared = next((section, field) for section, field in settings() if field.name == name)
    bounds = declared.metadata
    kind: Any = click.Choice(bounds["choices"]) if bounds["choices"] else field_type(section, name)
    text = bounds["help"]
    if "[default" not in text:
        text += f"  [default: {declared.default}]"
    default = declared.default if with_default else None
    return click.option(f"--{name.replace('_', '-')}", *more_names, name, type=kind, default=default, help=text)


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `jobs.run_job`: nproc, device, threads and timeout."""
    for name in reversed(JOB_SETTINGS):
        command = setting_option(name, with_default=True)(command)
    return command


def checkpoint_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option that chooses a checkpoint of a run, given as `which`."""
    text = "Checkpoint to open: best, latest, or its name."
    return click.option("--checkpoint", "which", default="best", show_default=True, help=text)(command)


def given_arguments() -> list[str]:
    """Spell out the running command for its workers, without --nproc, which their launcher tells them."""
    context = click.get_current_context()
    options, arguments = [], []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is None or parameter.name == "nproc" or not parameter.expose_value:
            continue
        if isinstance(parameter, click.Option) and parameter.is_flag:
            options += [parameter.opts[-1]] if value else parameter.secondary_opts[-1:]
            continue
        values = value if isinstance(value, (tuple, list)) else [value]
        if isinstance(parameter, click.Option):
            options += [f"{parameter.opts[-1]}={item}" for item in values]
        else:
            arguments += [str(item) for item in values]
    return [context.command.name or "", *options, "--", *arguments]
