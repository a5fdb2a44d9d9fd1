"""What every benchmark needs: a stamp of machine, versions and command, and a place for its results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def stamp(packages: Sequence[str] = ("torch", "numpy")) -> dict[str, Any]:
    """Say what is measured, with what, where and when."""
    name = Path(sys.argv[0]).stem
    arguments = [Path(word).name if "/" in word else word for word in sys.argv[1:]]  # names say enough, places do not
    return {
        "command": " ".join(["python -m", f"benchmarks.{name}", *arguments]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20, 1),
        "system": platform.system(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def write(name: str, result: dict[str, Any], markdown: str) -> None:
    """Write results/NAME.json and results/NAME.md, and show the latter."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    s = result["stamp"]
    versions = ", ".join(f"{package} {number}" for package, number in s["versions"].items())
    head = f"`{s['command']}`, {s['date']}, commit {s['commit']}  \n"
    head += f"{s['cpu']}, {s['cores']} cores, {s['memory_gib']} GiB, {s['system']}; {versions}\n\n"
    title, _, rest = markdown.partition("\n\n")
    (RESULTS / f"{name}.md").write_text(f"{title}\n\n{head}{rest}")
    print((RESULTS / f"{name}.md").read_text())


def memory(field: str) -> int:
    """Give a size of this process in bytes: VmRSS, resident now, or VmHWM, its peak so far."""
    return int(_field("/proc/self/status", field).split()[0]) * 1024


def _commit() -> str:
    """Name the commit that is measured, marked where the code is not the commit's; results and docs are no code."""
    git = ("git", "-C", str(RESULTS.parent.parent))
    changed = _output(*git, "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs")
    return _output(*git, "describe", "--always") + ("-dirty" if changed else "")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
