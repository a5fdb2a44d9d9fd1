"""Write the tables of docs/scaling.md: plans as the planner gives them, and its check as benchmarks.scale recorded it.

python -m benchmarks.scale_docs

What stands between `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from benchmarks import record
from sattle_dist.commands.plan import plan
from sattle_dist.units import size_text, time_text

DOC = Path(__file__).parent.parent / "docs" / "scaling.md"
GPU = "--device-memory 80GB --device-flops 19.5T --memory-bandwidth 2TB --bandwidth 25GB"
LAPTOP = "--device cpu --device-memory 16GB --device-flops 200G --memory-bandwidth 20GB"
GRAPHS = {  # as their authors count them; queries are known where we have ingested the graph
    "FB15k-237": "--entities 14541 --relations 237 --triples 272115 --queries 149689",
    "Wikidata5M": "--entities 4.6M --relations 822 --triples 21M",
    "Freebase": "--entities 86M --relations 14824 --triples 338M",
    "WikiKG90Mv2": "--entities 91M --relations 1387 --triples 601M",
}
CASES = [
    ("FB15k-237", "laptop", f"--dim 100 --batch-size 512 {LAPTOP}"),
    ("FB15k-237", "1 GPU", f"--dim 100 --batch-size 512 {GPU}"),
    ("Wikidata5M", "laptop", f"--dim 32 --batch-size 512 {LAPTOP}"),
    ("Wikidata5M", "1 GPU", f"--dim 100 --batch-size 4096 {GPU}"),
    ("Wikidata5M", "8 GPUs", f"--dim 100 --batch-size 4096 --devices 8 {GPU}"),
    ("Freebase", "8 GPUs", f"--dim 100 --batch-size 8192 --devices 8 {GPU}"),
    ("Freebase", "64 GPUs", f"--dim 100 --batch-size 16384 --devices 64 {GPU}"),
    ("WikiKG90Mv2", "8 GPUs", f"--dim 100 --batch-size 8192 --devices 8 {GPU}"),
    ("WikiKG90Mv2", "64 GPUs", f"--dim 100 --batch-size 16384 --devices 64 {GPU}"),
    ("WikiKG90Mv2", "64 GPUs", f"--dim 32 --batch-size 16384 --devices 64 {GPU}"),
]
SHOWN = f"{GRAPHS['WikiKG90Mv2']} --dim 100 --batch-size 16384 --devices 64 {GPU}"


def run_plan(arguments: str, *more: str) -> str:
    """Give the output of `sattle plan ARGUMENTS`."""
    result = CliRunner().invoke(plan, [*arguments.split(), *more], catch_exceptions=False)
    if result.exit_code:
        raise SystemExit(f"sattle plan {arguments}: {result.output}")
    return result.output.rstrip() + "\n"


def plans_table() -> str:
    """One line per graph and set of devices."""
    head = ["graph", "devices", "d", "queries a step", "memory of each", "fewest devices", "sent per step"]
    head += ["a step", "an epoch", "an epoch within a day"]
    lines = [f"| {' | '.join(head)} |", "|---|---" + "|---:" * (len(head) - 2) + "|"]
    for graph, devices, arguments in CASES:
        found: dict[str, Any] = json.loads(run_plan(f"{GRAPHS[graph]} {arguments}", "--json"))
        impractical = any("impractical" in text for text in found["warnings"])
        sent = found["bytes_sent_per_step"]["total"]
        cells = [
            graph,
            devices,
            found["workload"]["dim"],
            f"{found['workload']['batch_size']:,}",
            size_text(found["memory"]["peak"]),
            found["smallest_devices"] or "none",
            size_text(sent) if sent else "",
            time_text(found["step_seconds"]["total"]),
            time_text(found["epoch_seconds"]),
            "no" if impractical else "yes",
        ]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def recorded_check() -> str:
    """The planner against measurement, from the newest recorded run of benchmarks.scale."""
    from benchmarks.scale_report import check_table

    whole, quick = (record.RESULTS / f"{name}.json" for name in ("scale", "scale-quick"))
    path = whole if whole.exists() else quick
    if not path.exists():
        return "Nothing is recorded for this version yet.\n"
    result = json.loads(path.read_text())
    stamp, rows = result["stamp"], list(result["rows"].values())
    table = [line for line in check_table(rows, path.stem) if line.startswith(("|", "-", "Outside"))]
    split = next((i for i, line in enumerate(table) if not line.startswith("|")), len(table))
    where = f"`{stamp['command']}`, {stamp['date']}, commit {stamp['commit']}; {stamp['cpu']}, {stamp['cores']} cores,"
    where += f" torch {stamp['versions']['torch']}; {len(rows)} points."
    return "\n".join([where, "", *table[:split], *(["", *table[split:]] if table[split:] else [])]) + "\n"


def blocks() -> dict[str, str]:
    """Everything that is written into the document, by name."""
    return {
        "plans": plans_table(),
        "one plan": f"```\n$ sattle plan {SHOWN}\n{run_plan(SHOWN)}```\n",
        "check": recorded_check(),
    }


def fill(text: str, contents: dict[str, str]) -> str:
    """Replace the blocks of a text by their contents."""
    for name, content in contents.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        text, number = re.subn(pattern, lambda _: begin + content + end, text, flags=re.DOTALL)  # noqa: B023
        if number != 1:
            raise SystemExit(f"{DOC.name} has {number} blocks called {name!r}, expected one")
    return text


def write() -> None:
    DOC.write_text(fill(DOC.read_text(), blocks()))


if __name__ == "__main__":
    write()
