"""One self-contained HTML page about a run: no network, no scripts; every label is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any

from sattle_dist import charts
from sattle_dist.charts import bar_chart, line_chart, number
from sattle_dist.findings import Bin, Findings
from sattle_dist.graph import Graph
from sattle_dist.labels import Labels
from sattle_dist.learner import Learner
from sattle_dist.predict import Prediction, predict

SHOWN_RELATIONS = 20
MOST_RELATIONS = 500
METRICS = ("mrr", "hits@1", "hits@3", "hits@10")
PHASES = {
    "seconds": "training",
    "eval_seconds": "validation",
    "save_seconds": "saving",
    "save_stall_seconds": "waiting for saves",
}
Sample = tuple[str, list[Prediction]]


def sample_predictions(learner: Learner, graph: Graph, count: int, top: int = 5) -> list[Sample]:
    """Answer queries of the test split, evenly spread over it, in either direction. Every rank must call it."""
    index, labels = graph.index("test"), Labels(graph)
    samples = []
    for place in sorted({round(i * (len(index) - 1) / max(1, count - 1)) for i in range(count)} if len(index) else ()):
        entity_id, relation_id = divmod(int(index.queries[place]), index.num_relations_both)
        (entity,) = labels.of([entity_id], "entities")
        (relation,) = labels.of([relation_id % graph.num_relations], "relations")
        inverse = relation_id >= graph.num_relations
        source, target = (None, entity) if inverse else (entity, None)
        found = predict(learner, graph, labels, source=source, relation=relation, target=target, top=top)
        samples.append((f"{source or '?'}  {relation}  {target or '?'}", found))
    return samples


def render(results: Findings, samples: Sequence[Sample]) -> str:
    """Make the page."""
    sections: list[tuple[str, Callable[[], str]]] = [
        ("Training", lambda: training(results)),
        ("Where the time went", lambda: phases(results)),
        ("By direction and cardinality", lambda: breakdown(results)),
        ("By relation", lambda: relations(results)),
        ("Positions", lambda: positions(results)),
        ("Sample predictions", lambda: predictions(samples)),
        ("Protocol", lambda: protocol(results)),
        ("Config", lambda: f"<pre>{escape(results.config_text)}</pre>"),
    ]
    name = results.run_dir.resolve().name
    style = resources.files("sattle_dist").joinpath("report.css").read_text(encoding="utf-8") + charts.STYLE
    body = "".join(f"<section><h2>{title}</h2>{content()}</section>" for title, content in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(name)} - sattle report</title><style>{style}</style></head>'
        f"<body><main>{header(results, name)}{body}</main></body></html>\n"
    )


def header(results: Findings, name: str) -> str:
    graph, model, epochs = results.graph, results.config.model, results.epochs
    metrics = results.test.get("metrics", {})
    tiles = [(label, f"{metrics[key]:.4f}") for key, label in TILES.items() if key in metrics]
    if "mean_position" in metrics:
        tiles.append(("mean position", f"{metrics['mean_position']:,.1f}"))
    facts = (
        f"{graph.name}: {graph.num_entities:,} entities, {graph.num_relations:,} relations, "
        f"{graph.num_triples['train']:,} training triples. {model.decoder}, d = {model.dim}, {model.num_heads} heads, "
        f"{results.config.train.loss} loss; {len(epochs)} epochs."
    )
    count = f"Test split, filtered, {metrics['count']:,} queries ranked." if "count" in metrics else NOT_TESTED
    cells = "".join(f"<div class=tile><b>{value}</b><span>{label}</span></div>" for label, value in tiles)
    date = f"{datetime.now():%Y-%m-%d %H:%M}"
    return (
        f"<header><h1>{escape(name)}</h1><p>{escape(facts)}</p><div class=tiles>{cells}</div>"
        f"<p class=note>{count} Page made {date}.</p></header>"
    )


TILES = {"mrr": "MRR", "hits@1": "Hits@1", "hits@3": "Hits@3", "hits@10": "Hits@10", "amri": "AMRI"}
NOT_TESTED = "The test split has not been evaluated yet."


def figure(title: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"


def training(results: Findings) -> str:
    """Draw loss, validation MRR, learning rate and speed over the epochs."""
    epochs = results.epochs
    if not epochs:
        return "<p class=note>No epoch has ended yet.</p>"
    valid = [(e["epoch"], e["valid"]["mrr"]) for e in epochs if e.get("valid", {}).get("mrr") is not None]
    curves = [
        ("Loss", "loss", False),
        ("Learning rate", "learning_rate", True),
        ("Queries per second", "queries_per_second", True),
    ]
    figures = []
    for title, key, from_zero in curves:
        xs, ys = zip(*((e["epoch"], e[key]) for e in epochs), strict=True)
        figures.append(figure(title, line_chart(title, xs, ys, x_name="epoch", y_name="", from_zero=from_zero)))
    if valid:
        xs, ys = zip(*valid, strict=True)
        best = max(valid, key=lambda pair: pair[1])
        title = f"Validation MRR (best {best[1]:.4f}, epoch {best[0]})"
        figures.insert(1, figure(title, line_chart(title, xs, ys, x_name="epoch", y_name="", from_zero=True)))
    return f"<div class=grid>{''.join(figures)}</div>"


def phases(results: Findings) -> str:
    """Show the seconds of all epochs by phase, and the slowest epochs."""
    totals = {text: sum(e.get(key, 0) for e in results.epochs) for key, text in PHASES.items()}
    shown = [(text, seconds) for text, seconds in totals.items() if seconds > 0]
    if not shown:
        return "<p class=note>No times have been recorded.</p>"
    most = max(seconds for _, seconds in shown)
    rows = [(text, f"{seconds:,.1f}", bar(seconds / most)) for text, seconds in sorted(shown, key=lambda x: -x[1])]
    slow = sorted(results.epochs, key=lambda e: -e["seconds"])[:3]
    names = ", ".join(f"epoch {e['epoch']} ({e['seconds']:.1f} s)" for e in slow)
    note = (
        "Seconds of all epochs together. Saving goes on beside training; what training had to wait for is its own row."
    )
    return table(("phase", "seconds", ""), rows) + f"<p class=note>{note} Slowest: {names}.</p>"


def breakdown(results: Findings) -> str:
    """Show the metrics by direction, by cardinality, and of entities train lacks."""
    rows: list[tuple[str, ...]] = []
    asked = {"target": "target asked for", "source": "source asked for"}
    for key, metrics in results.test.get("by_direction", {}).items():
        rows.append((asked.get(key, key), *figures_of(metrics)))
    for key, sides in results.test.get("by_cardinality", {}).items():
        rows += [(f"{key}, {text}", *figures_of(sides.get(side, {}))) for side, text in asked.items()]
    for key, metrics in results.test.get("by_seen", {}).items():
        rows.append((f"entities {key} in training", *figures_of(metrics)))
    return table(HEAD, rows) if rows else f"<p class=note>{NOT_TESTED}</p>"


HEAD = ("", "queries", "MRR", "Hits@1", "Hits@3", "Hits@10", "")


def figures_of(metrics: dict[str, Any]) -> tuple[str, ...]:
    """Give count, metrics and a bar of the MRR as cells; dashes where nothing was counted."""
    if not metrics.get("count"):
        return ("0", *["-"] * len(METRICS), "")
    return (f"{metrics['count']:,}", *(f"{metrics[name]:.3f}" for name in METRICS), bar(metrics["mrr"]))


def relations(results: Findings) -> str:
    """Show the relations with most test facts, and fold the others away."""
    found = [r for r in results.test.get("by_relation", []) if r["both"].get("count")]
    if not found:
        return f"<p class=note>{NOT_TESTED}</p>"
    found.sort(key=lambda r: (-r["both"]["count"], r["relation"]))

    def mrr(metrics: dict[str, Any]) -> str:
        return f"{metrics['mrr']:.3f}" if metrics.get("count") else "-"

    rows = [
        (
            r["relation"],
            r["cardinality"] or "",
            f"{r['both']['count']:,}",
            mrr(r["both"]),
            mrr(r["target"]),
            mrr(r["source"]),
            f"{r['both']['hits@10']:.3f}",
            bar(r["both"]["mrr"]),
        )
        for r in found
    ]
    head = ("relation", "class", "queries", "MRR", "target asked", "source asked", "Hits@10", "")
    html = table(head, rows[:SHOWN_RELATIONS])
    if others := rows[SHOWN_RELATIONS:MOST_RELATIONS]:
        html += f"<details><summary>{len(others)} more</summary>{table(head, others)}</details>"
    return html


def positions(results: Findings) -> str:
    """Draw the histogram of positions, and the MRR by the degree of the answer."""
    if not results.by_position:
        return f"<p class=note>{NOT_TESTED}</p>"
    total = sum(item.count for item in results.by_position)

    def tips(bins: Iterable[Bin], what: str) -> list[str]:
        return [f"{what} {b.name}: {b.count:,} queries, MRR {b.mrr:.3f}" for b in bins]

    histogram = bar_chart(
        "Positions of the true answers",
        [b.name for b in results.by_position],
        [100 * b.count / total for b in results.by_position],
        x_name="position",
        y_name="% of queries",
        tips=tips(results.by_position, "position"),
    )
    degree = bar_chart(
        "MRR by degree",
        [number(b.start) for b in results.by_degree],
        [b.mrr for b in results.by_degree],
        x_name="training triples of the answer, from",
        y_name="MRR",
        tips=tips(results.by_degree, "degree"),
        most=1.0,
        texts=[number(b.count) for b in results.by_degree],
    )
    both = figure("Positions of the true answers", histogram)
    both += figure("MRR by the degree of the answer (above: queries)", degree)
    return f"<div class=grid>{both}</div>"


def predictions(samples: Sequence[Sample]) -> str:
    """Show each query with its best answers and their softmax shares."""
    if not samples:
        return "<p class=note>None were asked for.</p>"
    cards = []
    for query, found in samples:
        rows = [(p.label, f"{p.share:.4f}", bar(p.share), p.known_in) for p in found]
        cards.append(
            f"<div class=card><h3>{escape(query)}</h3>{table(('answer', 'share', '', 'known in'), rows)}</div>"
        )
    note = "Queries of the test split, evenly spread over it. Share: exp(score) over its sum over all entities."
    return f"<p class=note>{note}</p><div class=grid>{''.join(cards)}</div>"


def protocol(results: Findings) -> str:
    """Show how the test metrics were taken, as test.json says."""
    found = results.test.get("protocol", {})
    rows = [(key, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for key, v in found.items()]
    return table(("", ""), rows, kind="facts") if rows else f"<p class=note>{NOT_TESTED}</p>"


class Html(str):
    """Text that is HTML already."""


def bar(share: float) -> Html:
    """Draw a horizontal bar of this share of its cell."""
    return Html(f'<i class=meter><i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i></i>')


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "figures") -> str:
    """Make a table of texts, escaped unless they are Html."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{c if isinstance(c, Html) else escape(c)}</{tag}>" for c in row)

    first = f"<thead><tr>{cells(head, 'th')}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<div class=scroll><table class={kind}>{first}<tbody>{body}</tbody></table></div>"
