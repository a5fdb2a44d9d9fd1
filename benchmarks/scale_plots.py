"""The pictures of benchmarks.scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from benchmarks.scale_report import MEMORY_WITHIN, MIB, PAPER_NFP, TIME_WITHIN, Row, by, slope

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8e5ea2")
DASHES = {"twomult": "-", "tucker": "--"}


def plot(rows: list[Row], path: Path) -> None:
    """Draw every study into PATH-STUDY.png."""
    for name, draw in (
        ("model", draw_model),
        ("entities", draw_entities),
        ("processes", draw_processes),
        ("plan", draw_plan),
    ):
        figure = draw(rows if name == "plan" else [row for row in rows if row["study"] == name])
        for axis in figure.axes:
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(visible=True, which="major", color="#e4e4e4", linewidth=0.6)
            axis.set_axisbelow(True)
        figure.tight_layout()
        figure.savefig(path.with_name(f"{path.name}-{name}.png"), dpi=120)
        pyplot.close(figure)


def draw_model(rows: list[Row]) -> Any:
    """Parameters, throughput and memory by heads, and the encoder's time by dim."""
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8))
    dims = sorted({row["dim"] for row in rows})
    colour = dict(zip(dims, COLOURS, strict=False))
    panels = (("nfp", 1e6, "NFP, millions"), ("queries_per_second", 1, "queries/s"), ("peak_memory", MIB, "peak, MiB"))
    for axis, (column, unit, label) in zip(axes.flat, panels, strict=False):
        for (decoder, dim), group in by(rows, "decoder", "dim").items():
            x = [row["num_heads"] for row in group]
            y = [row[column] / unit for row in group]
            axis.plot(x, y, DASHES[decoder], color=colour[dim], marker="o", markersize=3, linewidth=1.4)
        logarithmic(axis, "heads", label, [row["num_heads"] for row in rows])
    heads = sorted({row["num_heads"] for row in rows})
    axes[0, 0].plot(heads, [PAPER_NFP[h] for h in heads], "k+", markersize=9, label="the paper, TwoMult, d=100")
    axes[0, 0].legend(frameon=False, fontsize=8)
    handles = [pyplot.Line2D([], [], color=colour[d], label=f"d={d}") for d in dims]
    handles += [pyplot.Line2D([], [], color="#555", linestyle=s, label=n) for n, s in DASHES.items()]
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncol": len(handles), "columnspacing": 1.0}
    axes[0, 1].legend(handles=handles, frameon=False, fontsize=8, handlelength=1.6, **place)
    draw_encoder(axes[1, 1], rows)
    return figure


def draw_encoder(axis: Any, rows: list[Row]) -> None:
    """The encoder's time by dim, with its exponent, at the heads where each law shows best."""
    most = max(row["num_heads"] for row in rows)
    for (decoder, heads), colour in zip((("twomult", most), ("tucker", 4)), COLOURS, strict=False):
        group = [row for row in rows if row["decoder"] == decoder and row["num_heads"] == heads]
        x = np.array([row["dim"] for row in group])
        measured = slope(group, "dim", "encoder_seconds")
        counted = slope(group, "dim", "encoder_flops")
        y = np.array([1e3 * row["encoder_seconds"] for row in group])
        label = f"{decoder}, {heads} heads: d^{measured:.2f} (operations: d^{counted:.2f})"
        axis.plot(x, y, "o", color=colour)
        centre = np.exp(np.log(x).mean()), np.exp(np.log(y).mean())
        axis.plot(x, centre[1] * (x / centre[0]) ** measured, DASHES[decoder], color=colour, label=label)
    logarithmic(axis, "d", "encoder and decoder, ms per step", [row["dim"] for row in rows])
    axis.legend(frameon=False, fontsize=8)


def draw_entities(rows: list[Row]) -> Any:
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    panels = (("seconds", 1, "seconds per step"), ("peak_memory", MIB, "peak memory of the process, MiB"))
    for axis, (column, unit, label) in zip(axes, panels, strict=True):
        for ((loss,), group), colour in zip(by(rows, "loss").items(), COLOURS, strict=False):
            x = [row["entities"] for row in group]
            text = f"{loss}, measured"
            if column == "seconds":
                text += f": N^{slope(group[-2:], 'entities', column):.2f} over the last two"
            axis.plot(x, [row[column] / unit for row in group], "-o", color=colour, label=text)
            predicted = [row[f"predicted_{column.removeprefix('peak_')}"] / unit for row in group]
            axis.plot(x, predicted, "x", color="#333", markersize=8, label="planned" if colour == COLOURS[1] else None)
        logarithmic(axis, "entities", label, [])
        axis.legend(frameon=False, fontsize=8)
    return figure


def draw_processes(rows: list[Row]) -> Any:
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    most = max(row["processes"] for row in rows)
    axes[0].plot([1, most], [1, most], color="#bbb", linestyle=":", label="ideal")
    for ((entities,), group), colour in zip(by(rows, "entities").items(), COLOURS, strict=False):
        x = [row["processes"] for row in group]
        label = f"{entities:,} entities, d={group[0]['dim']}"
        axes[0].plot(x, [group[0]["seconds"] / row["seconds"] for row in group], "-o", color=colour, label=label)
        axes[1].plot(x, [row["bytes_sent"] / MIB for row in group], "-o", color=colour, label=label)
        planned = [row["predicted_bytes_sent"] / MIB for row in group]
        axes[1].plot(x, planned, "x", color="#333", markersize=8, label="planned" if colour == COLOURS[0] else None)
    for axis, label in zip(axes, ("speed-up", "MiB sent per step and process"), strict=True):
        axis.set_xlabel("processes, one thread each")
        axis.set_ylabel(label)
        axis.set_xticks(sorted({row["processes"] for row in rows}))
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
    return figure


def draw_plan(rows: list[Row]) -> Any:
    """Predicted against measured, with the promised bands."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6))
    panels = (
        ("peak_memory", "predicted_memory", MIB, MEMORY_WITHIN, "peak memory, MiB"),
        ("seconds", "predicted_seconds", 1, TIME_WITHIN, "seconds per step"),
    )
    for axis, (measured, predicted, unit, bound, label) in zip(axes, panels, strict=True):
        for ((study,), group), colour in zip(by(rows, "study").items(), COLOURS, strict=False):
            x, y = ([row[name] / unit for row in group] for name in (measured, predicted))
            axis.plot(x, y, "o", color=colour, markersize=4, alpha=0.8, label=study)
        ends = np.array([min(r[measured] for r in rows) / unit / 1.3, max(r[measured] for r in rows) / unit * 1.3])
        axis.plot(ends, ends, color="#999", linewidth=0.8)
        axis.fill_between(ends, ends * (1 - bound), ends * (1 + bound), color="#ddd", alpha=0.5, label=f"±{bound:.0%}")
        logarithmic(axis, f"measured: {label}", "predicted", [])
        axis.legend(frameon=False, fontsize=8)
    return figure


def logarithmic(axis: Any, x_label: str, y_label: str, ticks: list[int]) -> None:
    """Make both axes logarithmic, with plain numbers at them: 1, 2, 5, 10 ..."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    for one, limits in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        decades = math.log10(limits[1] / limits[0])
        subs = (1,) if decades > 2.5 else (1, 2, 5) if decades > 1 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        one.set_major_locator(LogLocator(subs=subs))
        one.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
        one.set_minor_locator(NullLocator())
    if ticks:
        axis.set_xticks(sorted(set(ticks)), [str(tick) for tick in sorted(set(ticks))])


def plain(value: float) -> str:
    """Write a tick: 0.05, 20, 5,000, 10M."""
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"
