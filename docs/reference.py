"""Write docs/reference.md from the commands' own --help: `make docs`. A test compares the two."""

from __future__ import annotations

from pathlib import Path

import click

from sattle_dist.cli import main

PAGE = Path(__file__).with_name("reference.md")
WIDTH = 110
HEAD = """# Reference: every command and option

Made from `--help` by `make docs`; do not edit. `sattle-ingest` is `sattle ingest`, and `launchers/train.py`
is `sattle train`.
"""


def reference() -> str:
    """Give the page: the help of `sattle` and of each of its commands."""
    settings = {"terminal_width": WIDTH, "max_content_width": WIDTH, "color": False}
    parent = click.Context(main, info_name="sattle", **{**main.context_settings, **settings})
    pages = [("sattle", main.get_help(parent))]
    for name in main.list_commands(parent):
        command = main.get_command(parent, name)
        assert command is not None
        pages.append((f"sattle {name}", command.get_help(click.Context(command, parent, name, **settings))))
    return HEAD + "".join(f"\n## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in pages)


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
