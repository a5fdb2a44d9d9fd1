"""Simple charts as inline SVG: lines and bars with axes. Colours are CSS variables, so a page decides on light or dark.

Labels may come from anybody's graph: every text that is drawn goes through `escape`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 14, 46

STYLE = """
svg.chart { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; }
svg.chart text { fill: var(--muted); }
svg.chart .grid { stroke: var(--line); stroke-width: 1; }
svg.chart .line { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round; }
svg.chart .dot, svg.chart .bar { fill: var(--accent); }
svg.chart .bar:hover, svg.chart .dot:hover { fill: var(--strong); }
svg.chart .tick { font-size: 10.5px; }
svg.chart .value { fill: var(--text); text-anchor: middle; font-size: 11px; }
"""


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Give round numbers that span [low, high], about `wanted` of them."""
    if not high > low:
        high, low = low + (abs(low) or 1) / 2, low - (abs(low) or 1) / 2
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= rough)
    first = math.floor(low / step)
    return [step * i for i in range(first, math.ceil(high / step - 1e-9) + 1)]


def number(value: float) -> str:
    """Write a number shortly: 12k, 3.4M, 0.012."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.4g}"


class _Frame:
    """The area of a chart with its axes; places values of y in [ys[0], ys[-1]]."""

    def __init__(self, ys: Sequence[float], x_name: str, y_name: str) -> None:
        self.low, self.high = ys[0], ys[-1]
        middle = (WIDTH + LEFT - RIGHT) / 2
        self.parts = [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.y(v):.1f}" y2="{self.y(v):.1f}"/>'
            f'<text x="{LEFT - 7}" y="{self.y(v) + 4:.1f}" text-anchor="end">{number(v)}</text>'
            for v in ys
        ]
        self.parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>')
        place = f"translate(12 {(HEIGHT - BOTTOM + TOP) / 2}) rotate(-90)"
        self.parts.append(f'<text transform="{place}" text-anchor="middle">{escape(y_name)}</text>')

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def x_text(self, x: float, text: str) -> None:
        place = f'x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}"'
        self.parts.append(f'<text class="tick" {place} text-anchor="middle">{escape(text)}</text>')

    def svg(self, title: str) -> str:
        head = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        return head + "".join(self.parts) + "</svg>"


def line_chart(
    title: str, xs: Sequence[float], ys: Sequence[float], *, x_name: str, y_name: str, from_zero: bool = False
) -> str:
    """Draw y over x as a line, with a dot and a tooltip for each point where there are few."""
    frame = _Frame(ticks(min(0.0, *ys) if from_zero else min(ys), max(ys)), x_name, y_name)
    low, high = (xs[0], xs[-1]) if xs[-1] > xs[0] else (xs[0] - 0.5, xs[0] + 0.5)

    def x_place(x: float) -> float:
        return LEFT + 8 + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT - 16)

    for x in ticks(low, high, 6):
        if low <= x <= high and x == round(x):
            frame.x_text(x_place(x), number(x))
    points = [(x_place(x), frame.y(y)) for x, y in zip(xs, ys, strict=True)]
    frame.parts.append(f'<polyline class="line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
    radius = 3 if len(points) <= 60 else 1.5
    frame.parts += [
        f'<circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="{radius}">'
        f"<title>{escape(x_name)} {number(x)}: {number(y)}</title></circle>"
        for (px, py), x, y in zip(points, xs, ys, strict=True)
    ]
    return frame.svg(title)


def bar_chart(
    title: str,
    names: Sequence[str],
    values: Sequence[float],
    *,
    x_name: str,
    y_name: str,
    tips: Sequence[str],
    most: float | None = None,
    texts: Sequence[str] | None = None,
) -> str:
    """Draw a bar from zero for each name, with a text above and a tooltip; `most` fixes the upper end of the axis."""
    frame = _Frame(ticks(0, most or max([*values, 1e-9])), x_name, y_name)
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    for i, (name, value, tip) in enumerate(zip(names, values, tips, strict=True)):
        x, y = LEFT + (i + 0.12) * slot, frame.y(value)
        frame.parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{0.76 * slot:.1f}" rx="2" '
            f'height="{frame.y(0) - y:.1f}"><title>{escape(tip)}</title></rect>'
        )
        if texts:
            frame.parts.append(
                f'<text class="value" x="{x + 0.38 * slot:.1f}" y="{y - 4:.1f}">{escape(texts[i])}</text>'
            )
        frame.x_text(x + 0.38 * slot, name)
    return frame.svg(title)
