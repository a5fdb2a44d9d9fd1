"""The tables of benchmarks.scale: rows as measured, growth against its law, the planner against measurement."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]

PAPER_NFP = {4: 0.50, 8: 0.56, 16: 0.70, 32: 0.96, 64: 1.50, 128: 2.58}  # millions; FB15k-237, TwoMult, d=100
UNREAD = 29_502  # parameters in the authors' code that no forward pass reads
MEMORY_WITHIN, TIME_WITHIN = 0.15, 0.30
MIB = 2**20


def render(rows: list[Row], name: str) -> str:
    """Write all tables."""
    studies = {study: [row for row in rows if row["study"] == study] for study in ("model", "entities", "processes")}
    return "\n".join(
        [
            "# Scale",
            "",
            "Random graphs with 4 targets a query, 64-head defaults otherwise (d_k 32, d_v 50, d_h 2048), dropout on."
            " A step's time is the median of its steps, with its share of planning batches; peak memory is what the"
            " system counts for the whole process, Python and torch included. Every point ran in processes of its own.",
            "",
            disturbance(rows),
            "",
            *mixed_versions(rows),
            *parameters_table(studies["model"]),
            *model_table(studies["model"], name),
            *entities_table(studies["entities"], name),
            *processes_table(studies["processes"], name),
            *laws_table(studies),
            *check_table(rows, name),
        ]
    )


def disturbance(rows: list[Row]) -> str:
    """Say how steady the machine was."""
    others, drift = ([float(row[name]) for row in rows] for name in ("others", "drift"))
    return (
        f"Meanwhile other processes kept {np.median(others):.2f} cores busy in the median, {max(others):.2f} at most;"
        f" calibrations before and after a point differed by {np.median(drift):.0%} in the median, {max(drift):.0%} at"
        " most. A point with more than 0.1 cores or 20% was measured again, up to three times."
    )


def mixed_versions(rows: list[Row]) -> list[str]:
    """Own up where not all points were measured on the same code."""
    versions = {row["version"] for row in rows}
    dates = sorted({row["date"] for row in rows})
    text = f"Points of {len(versions)} versions of the code, measured from {dates[0]} to {dates[-1]}."
    return [f"**{text}**", ""] if len(versions) > 1 else []


def markdown(head: list[str], body: Iterable[Iterable[Any]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return [*lines, *(f"| {' | '.join(str(cell) for cell in cells)} |" for cells in body), ""]


def parameters_table(rows: list[Row]) -> list[str]:
    """NFP by heads for every dim and decoder, with the paper's where it gives them."""
    heads = sorted({row["num_heads"] for row in rows})
    counts = {(row["decoder"], row["dim"], row["num_heads"]): row for row in rows}
    body = []
    for decoder, dim in sorted({key[:2] for key in counts}, reverse=True):
        some = counts[decoder, dim, heads[0]]
        nfp = [f"{counts[decoder, dim, h]['nfp'] / 1e6:.3f}" for h in heads]
        body.append([decoder, dim, f"{some['efp'] / 1e6:.3f}", *nfp])
        if (decoder, dim) == ("twomult", 100):
            body.append(["the paper", 100, "1.50", *(f"{PAPER_NFP[h]:.2f}" for h in heads)])
    ours = counts["twomult", 100, 64]["nfp"]
    return [
        "## Parameters",
        "",
        "Millions, for FB15k-237 (14,541 entities, 237 relations). NFP: parameters outside the two embedding tables,"
        " by number of heads; EFP: inside them."
        f" At d=100 and 64 heads the authors' code also holds {UNREAD:,} parameters that no forward pass reads. Ours"
        f" holds none such: {ours:,}, with them {ours + UNREAD:,}, where the paper says 1.50 million.",
        "",
        *markdown(["decoder", "d", "EFP", *(f"NFP, {h} heads" for h in heads)], body),
    ]


def model_table(rows: list[Row], name: str) -> list[str]:
    body = (
        [
            row["decoder"],
            row["dim"],
            row["num_heads"],
            f"{1e3 * row['seconds']:.0f}",
            f"{row['queries_per_second']:,.0f}",
            f"{row['triples_per_second']:,.0f}",
            f"{row['peak_memory'] / MIB:.0f}",
        ]
        for row in rows
    )
    head = ["decoder", "d", "heads", "ms per step", "queries/s", "triples/s", "peak MiB"]
    return [
        "## Model size",
        "",
        f"{described(rows)}.",
        "",
        f"![throughput and memory against d and heads]({name}-model.png)",
        "",
        *markdown(head, body),
    ]


def described(rows: list[Row]) -> str:
    """Say what all rows of a table have in common."""
    row = rows[0]
    processes = f"1 process of {row['threads']} threads" if row["processes"] == 1 else ""
    return f"{row['entities']:,} entities, {row['loss']} loss, {row['batch_size']} queries per step, {processes}"


def entities_table(rows: list[Row], name: str) -> list[str]:
    body = (
        [
            f"{row['entities']:,}",
            row["loss"],
            f"{1e3 * row['seconds']:,.0f}",
            f"{row['queries_per_second']:,.1f}",
            f"{row['peak_memory'] / MIB:,.0f}",
            f"{16 * row['entities'] * (row['dim'] + 1) / MIB:,.0f}",
        ]
        for row in sorted(rows, key=lambda row: (row["loss"], row["entities"]))
    )
    some = rows[0]
    return [
        "## Entities",
        "",
        f"TwoMult, d={some['dim']}, {some['num_heads']} heads, {some['batch_size']} queries per step, 1 process of"
        f" {some['threads']} threads. The table: rows, biases, their gradients and Adam's moments.",
        "",
        f"![step time and memory against entities]({name}-entities.png)",
        "",
        *markdown(["entities", "loss", "ms per step", "queries/s", "peak MiB", "the table alone, MiB"], body),
    ]


def processes_table(rows: list[Row], name: str) -> list[str]:
    body = []
    for row in sorted(rows, key=lambda row: (row["entities"], row["processes"])):
        alone = next(r for r in rows if r["processes"] == 1 and r["entities"] == row["entities"])
        body.append(
            [
                f"{row['entities']:,}",
                row["dim"],
                row["num_heads"],
                row["batch_size"],
                row["processes"],
                f"{row['queries_per_second']:,.0f}",
                f"{alone['seconds'] / row['seconds']:.2f}",
                f"{row['bytes_sent'] / MIB:.2f}",
                f"{row['predicted_bytes_sent'] / MIB:.2f}",
                f"{row['peak_memory'] / MIB:,.0f}",
            ]
        )
    head = ["entities", "d", "heads", "queries per step", "processes", "queries/s", "speed-up"]
    head += ["MiB sent per step", "as planned", "peak MiB per process"]
    return [
        "## Processes",
        "",
        "TwoMult, softmax, one thread per process; beyond the number of cores they share them. Bytes are those of the"
        " process that sends most.",
        "",
        f"![speed-up and bytes against processes]({name}-processes.png)",
        "",
        *markdown(head, body),
    ]


def slope(rows: list[Row], x: str, y: str) -> float:
    """Fit y = c x^slope, the straight line through the logarithms."""
    return float(np.polyfit(np.log([row[x] for row in rows]), np.log([row[y] for row in rows]), 1)[0])


def laws_table(studies: dict[str, list[Row]]) -> list[str]:
    """Compare growth as measured, as the operations were counted, and as the law has it in the limit."""
    model = studies["model"]
    entities = [
        {**row, "memory_above": above_start(row, "peak_memory")}
        for row in studies["entities"]
        if row["loss"] == "softmax"
    ]
    most = max(row["num_heads"] for row in model)
    wide = max(row["dim"] for row in model)

    def pick(decoder: str, **fixed: int) -> list[Row]:
        wanted = {"decoder": decoder, **fixed}
        return [row for row in model if all(row[name] == value for name, value in wanted.items())]

    cases: list[tuple[str, str, str, list[Row], str, str]] = [
        ("encoder, TwoMult", "d", "2", pick("twomult", num_heads=most), "encoder_flops", "encoder_seconds"),
        ("encoder and decoder, Tucker", "d", "3", pick("tucker", num_heads=4), "encoder_flops", "encoder_seconds"),
        ("encoder, TwoMult", "heads", "1", pick("twomult", dim=wide), "encoder_flops", "encoder_seconds"),
        ("scoring", "d", "1", pick("twomult", num_heads=4), "score_flops", "score_seconds"),
        ("scoring", "N", "1", entities, "score_flops", "score_seconds"),
        ("step", "N", "1", entities, "", "seconds"),
        ("memory above an idle process", "N", "1", entities, "", "memory_above"),
    ]
    columns = {"d": "dim", "heads": "num_heads", "N": "entities"}
    body = []
    for what, over, law, rows, counted, measured in cases:
        ends = rows[0][columns[over]], rows[-1][columns[over]]
        counted_slope = f"{slope(rows, columns[over], counted):.2f}" if counted else ""
        upper = sorted(rows, key=lambda row: float(row[columns[over]]))[-2:]
        body.append(
            [
                what,
                f"{over} from {ends[0]:,} to {ends[1]:,}",
                law,
                counted_slope,
                f"{slope(rows, columns[over], measured):.2f}",
                f"{slope(upper, columns[over], measured):.2f}",
            ]
        )
    head = ["what", "over", "exponent of the law", "fitted to counted operations", "fitted to measurement"]
    return [
        "## Growth against its law",
        "",
        "Exponents fitted by least squares in logarithms. A law is a limit: the encoder also has terms linear in d (its"
        " d_k, d_v and d_h are fixed), so over these d its operations grow slower than d^2 (TwoMult) and d^3 (Tucker);"
        " the measured exponent is to be compared with that of the operations. The last column is over the two largest"
        " sizes alone.",
        "",
        *markdown([*head, "the two largest"], body),
    ]


def check_table(rows: list[Row], name: str) -> list[str]:
    """Hold the planner to the measurement, over the whole grid."""
    errors = {
        "peak memory": [row["predicted_memory"] / row["peak_memory"] - 1 for row in rows],
        "peak memory above that of an idle process": [
            above_start(row, "predicted_memory") / above_start(row, "peak_memory") - 1 for row in rows
        ],
        "step time": [row["predicted_seconds"] / row["seconds"] - 1 for row in rows],
    }
    within = {"peak memory": MEMORY_WITHIN, "step time": TIME_WITHIN}
    body = []
    for what, values in errors.items():
        bound = within.get(what)
        inside = sum(abs(value) <= bound for value in values) if bound else 0
        body.append(
            [
                what,
                f"{np.median(np.abs(values)):.1%}",
                f"{min(values):+.1%} to {max(values):+.1%}",
                f"{bound:.0%}" if bound else "",
                f"{inside} of {len(rows)}" if bound else "",
            ]
        )
    outside = [
        f"- {row['study']}: {row['decoder']}, d={row['dim']}, {row['num_heads']} heads, {row['entities']:,} entities,"
        f" {row['processes']} processes: {what} {row[f'predicted_{column}'] / row[measured] - 1:+.0%}"
        for what, column, measured in (("memory", "memory", "peak_memory"), ("time", "seconds", "seconds"))
        for row in rows
        if abs(row[f"predicted_{column}"] / row[measured] - 1) > (MEMORY_WITHIN if what == "memory" else TIME_WITHIN)
    ]
    return [
        "## The planner against measurement",
        "",
        "`sattle plan` was asked for every point, with its own calibration, just before the point was measured."
        " Errors are predicted / measured - 1.",
        "",
        f"![predicted against measured]({name}-plan.png)",
        "",
        *markdown(["", "median error", "range", "promised within", "points inside"], body),
        *(["Outside:", "", *outside, ""] if outside else []),
    ]


def above_start(row: Row, column: str) -> float:
    """Take away what a process holds before it has made anything."""
    return float(row[column] - row["start_memory"])


def write_table(rows: list[Row], path: Path) -> None:
    """Write the rows as CSV and Parquet."""
    flat = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]))
        writer.writeheader()
        writer.writerows(flat)
    pq.write_table(pa.Table.from_pylist(flat), path.with_suffix(".parquet"))


def by(rows: list[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by these columns."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups
