"""Look for what made FB15k and WN18 useless: held-out triples that train gives away, and relations that mirror others.

For relations p and q, with pairs(p) the (source, target) pairs of p in train:
  duplicate overlap = |pairs(p) & pairs(q)| / min(|pairs(p)|, |pairs(q)|)
  inverse overlap   = |pairs(p) & swapped pairs(q)| / min(|pairs(p)|, |pairs(q)|); p = q means that p is symmetric
"""

from __future__ import annotations

from dataclasses import dataclass

import duckdb

NEAR = 0.8
_SHOWN_PAIRS = 20


@dataclass(frozen=True)
class RelationPair:
    """Two relations that say the same, or the inverse, of many pairs of entities."""

    kind: str  # "inverse" or "duplicate"
    first: str
    second: str
    pairs: int
    overlap: float


@dataclass(frozen=True)
class Leaks:
    """How many triples of one split train gives away; a triple can count in several."""

    same: int
    """The triple itself is in train."""
    inverse: int
    """Train has (target, any relation, source)."""
    duplicate: int
    """Train has (source, another relation, target)."""
    any: int
    """At least one of these."""


def find_leaks(connection: duckdb.DuckDBPyConnection, split: str) -> Leaks:
    """Count the triples of a split whose pair of entities is in train. Needs the view ids (split, source, ...)."""
    query = f"""
        WITH held AS (SELECT * FROM ids WHERE split = '{split}'),
             train AS (SELECT source, relation, target FROM ids WHERE split = 'train'),
             same AS (SELECT source, relation, target FROM held SEMI JOIN train USING (source, relation, target)),
             inverse AS (
                 SELECT h.source, h.relation, h.target FROM held h
                 SEMI JOIN train t ON h.source = t.target AND h.target = t.source),
             duplicate AS (
                 SELECT h.source, h.relation, h.target FROM held h
                 SEMI JOIN train t ON h.source = t.source AND h.target = t.target AND h.relation <> t.relation)
        SELECT (SELECT count(*) FROM same), (SELECT count(*) FROM inverse), (SELECT count(*) FROM duplicate),
               (SELECT count(*) FROM (FROM same UNION FROM inverse UNION FROM duplicate))
    """
    ((same, inverse, duplicate, any_),) = connection.execute(query).fetchall()
    return Leaks(same=same, inverse=inverse, duplicate=duplicate, any=any_)


def find_pairs(connection: duckdb.DuckDBPyConnection, near: float = NEAR) -> list[RelationPair]:
    """List the relation pairs that overlap by at least `near` in train, the strongest first."""
    found = []
    for kind, condition, order in (
        ("inverse", "a.source = b.target AND a.target = b.source", "a.relation <= b.relation"),
        ("duplicate", "a.source = b.source AND a.target = b.target", "a.relation < b.relation"),
    ):
        query = f"""
            WITH train AS (SELECT source, relation, target FROM ids WHERE split = 'train'),
                 sizes AS (SELECT relation, count(*) AS size FROM train GROUP BY relation),
                 shared AS (
                     SELECT a.relation AS p, b.relation AS q, count(*) AS pairs
                     FROM train a JOIN train b ON {condition} AND {order} GROUP BY ALL)
            SELECT l.label, m.label, pairs, pairs / least(x.size, y.size) AS overlap
            FROM shared JOIN sizes x ON x.relation = p JOIN sizes y ON y.relation = q
            JOIN relations l ON l.relation_id = p JOIN relations m ON m.relation_id = q
            WHERE pairs >= {near} * least(x.size, y.size)
            ORDER BY overlap DESC, pairs DESC, p, q
        """
        found += [RelationPair(kind, *row) for row in connection.execute(query).fetchall()]
    return sorted(found, key=lambda pair: (-pair.overlap, -pair.pairs))
