"""`sattle info`: what a graph holds, and whether train gives its valid and test triples away."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duckdb

from ingest.database import parquet, quote, select_ids
from ingest.errors import IngestError
from ingest.leakage import find_leaks, find_pairs
from ingest.manifest import check_sizes, read_manifest, verify
from ingest.options import SPLITS

_SHOWN = 10


def describe(graph: Path, *, check: bool = False, leakage: bool = True) -> dict[str, Any]:
    """Gather what `sattle info` shows; with `check`, recompute all checksums first."""
    manifest = read_manifest(graph)
    check_sizes(graph, manifest)
    if check:
        verify(graph, manifest)
    facts: dict[str, Any] = {key: manifest[key] for key in ("name", "num_entities", "num_relations", "splits")}
    facts.update({key: manifest[key] for key in ("split", "lines", "checksum") if key in manifest})
    if check:
        facts["verified"] = True
    try:
        with tempfile.TemporaryDirectory(prefix="sattle-info-") as spill:
            connection = _open_ids(graph, Path(spill))
            try:
                facts.update(_counts(connection))
                if leakage:
                    facts["leakage"] = {split: asdict(find_leaks(connection, split)) for split in SPLITS[1:]}
                    facts["relation_pairs"] = [asdict(pair) for pair in find_pairs(connection)]
            finally:
                connection.close()
    except duckdb.Error as error:
        raise IngestError(f"{graph} cannot be read ({str(error).splitlines()[0]}); check it with --verify") from None
    return facts


def _open_ids(graph: Path, spill: Path) -> duckdb.DuckDBPyConnection:
    """Open the views ids (split, source, relation, target), entities and relations."""
    connection = duckdb.connect(":memory:")
    connection.execute(f"SET temp_directory = {quote(spill)}")
    connection.execute("SET enable_progress_bar = false")
    connection.execute(f"CREATE VIEW ids AS {select_ids(graph)}")
    for table in ("entities", "relations"):
        connection.execute(f"CREATE VIEW {table} AS SELECT * FROM {parquet(graph / f'{table}.parquet')}")
    return connection


def _counts(connection: duckdb.DuckDBPyConnection) -> dict[str, Any]:
    """Count degrees, relations and unseen entities, all in train unless said otherwise."""
    quantiles = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
    ((values, mean),) = connection.execute(
        f"SELECT quantile_disc(degree, {list(quantiles)}), avg(degree) "
        "FROM (SELECT num_train_as_source + num_train_as_target AS degree FROM entities)"
    ).fetchall()
    relations = connection.execute(
        "SELECT label, num_train, cardinality FROM relations ORDER BY num_train DESC, relation_id"
    ).fetchall()
    classes = connection.execute(
        "SELECT cardinality, count(*), sum(num_train)::BIGINT FROM relations GROUP BY cardinality ORDER BY cardinality"
    ).fetchall()
    unseen = "SELECT entity_id FROM entities WHERE num_train_as_source + num_train_as_target = 0"
    ((num_unseen,),) = connection.execute(f"SELECT count(*) FROM ({unseen})").fetchall()
    with_unseen = dict(
        connection.execute(
            f"WITH unseen AS ({unseen}) SELECT split::VARCHAR, count(*) FROM ids WHERE split <> 'train' AND "
            "(source IN (FROM unseen) OR target IN (FROM unseen)) GROUP BY split"
        ).fetchall()
    )
    return {
        "degrees": {"mean": mean, "quantiles": dict(zip(map(str, quantiles), values, strict=True))},
        "relations": [dict(zip(("label", "num_train", "cardinality"), row, strict=True)) for row in relations],
        "cardinalities": {name: {"relations": count, "num_train": triples} for name, count, triples in classes},
        "unseen_in_train": {
            "entities": num_unseen,
            "triples": {split: with_unseen.get(split, 0) for split in SPLITS[1:]},
        },
    }


def render(facts: dict[str, Any]) -> str:
    """Write the facts as text for a person."""
    lines = [f"{facts['name']}: {facts['num_entities']:,} entities, {facts['num_relations']:,} relations"]
    for split in SPLITS:
        counts = facts["splits"][split]
        lines.append(f"  {split:<6}{counts['triples']:>14,} triples {counts['queries']:>14,} queries, both directions")
    if "lines" in facts:
        account = facts["lines"]
        lines.append(
            f"  lines: {account['read']:,} read = {account['kept']:,} kept + {account['duplicates']:,} duplicates + "
            f"{account['rejected']:,} rejected"
        )
    lines.append(f"  checksum: {facts['checksum']}" + (", all files verified" if facts.get("verified") else ""))
    degrees = facts["degrees"]
    lines += ["", f"degree of an entity in train: mean {degrees['mean']:.1f}; share of entities at or below"]
    lines.append("  " + "  ".join(f"{float(q):.0%}: {value:,}" for q, value in degrees["quantiles"].items()))
    unseen = facts["unseen_in_train"]
    lines.append(
        f"entities unseen in train: {unseen['entities']:,} (in {unseen['triples']['valid']:,} valid and "
        f"{unseen['triples']['test']:,} test triples)"
    )
    lines += ["", "relations by class (more than 1.5 targets or sources a query make an N)"]
    for name, counts in facts["cardinalities"].items():
        lines.append(f"  {name}: {counts['relations']:,} relations, {counts['num_train']:,} training triples")
    lines += ["", f"relations by frequency in train (first {min(_SHOWN, len(facts['relations']))})"]
    for relation in facts["relations"][:_SHOWN]:
        lines.append(f"  {relation['num_train']:>12,}  {relation['cardinality']}  {_printable(relation['label'])}")
    return "\n".join(lines + _render_leakage(facts)) + "\n"


def _render_leakage(facts: dict[str, Any]) -> list[str]:
    if "leakage" not in facts:
        return []
    lines = ["", "leakage: held-out triples whose pair of entities is in train"]
    for split in SPLITS[1:]:
        leaks, total = facts["leakage"][split], facts["splits"][split]["triples"]
        share = f"{leaks['any'] / total:.1%}" if total else "0%"
        lines.append(
            f"  {split:<6}{leaks['any']:,} of {total:,} ({share}): the other way round {leaks['inverse']:,}, "
            f"under another relation {leaks['duplicate']:,}, the triple itself {leaks['same']:,}"
        )
    pairs = facts["relation_pairs"]
    lines.append(f"near-inverse and near-duplicate relations (overlap of at least 80%): {len(pairs)}")
    for pair in pairs[:_SHOWN]:
        first, second = _printable(pair["first"]), _printable(pair["second"])
        what = f"{first} is symmetric" if first == second else f"{pair['kind']}: {first} | {second}"
        lines.append(f"  {pair['overlap']:>6.1%} ({pair['pairs']:,} shared pairs)  {what}")
    if len(pairs) > _SHOWN:
        lines.append(f"  ... and {len(pairs) - _SHOWN} more (--json lists all)")
    return lines


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
