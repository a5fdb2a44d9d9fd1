"""Owns the built-in graph: family trees in which every held-out fact follows from the facts kept in training.

    from ingest.families import ensure_family_graph, family_triples

    splits = family_triples()  # {"train": [("eva_miller", "child_of", "erik_miller"), ...], "valid": ..., "test": ...}
    graph = ensure_family_graph()  # the same as a graph directory in the user's cache folder, made on first use

A family starts with one couple and has four generations; families do not intermarry. All facts about it are the
closure of who is whose mother, father, spouse, brother and sister under RULES. Each held-out fact is the head of a
rule whose body lies in train, so one step of reasoning recovers it.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import TypeVar

from ingest.build import ingest_triples
from ingest.cache import CACHE_VARIABLE, cache_folder, is_graph
from ingest.errors import IngestError
from ingest.options import IngestOptions

Triple = tuple[str, str, str]
_T = TypeVar("_T")

FAMILIES_VERSION = 1
"""Names the cached graph's folder: raise it when the default output of family_triples or the graph format changes."""

HELD_OUT_ONE_IN = 20
"""One in so many facts of each relation goes to valid, and again to test."""

RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("parent_of", ("mother_of",)),
    ("parent_of", ("father_of",)),
    ("parent_of", ("~child_of",)),
    ("parent_of", ("spouse_of", "parent_of")),
    ("child_of", ("~parent_of",)),
    ("mother_of", ("mother_of", "sibling_of")),
    ("mother_of", ("spouse_of", "father_of")),
    ("father_of", ("father_of", "sibling_of")),
    ("father_of", ("spouse_of", "mother_of")),
    ("spouse_of", ("~spouse_of",)),
    ("sibling_of", ("~sibling_of",)),
    ("sibling_of", ("brother_of",)),
    ("sibling_of", ("sister_of",)),
    ("sibling_of", ("child_of", "parent_of")),
    ("brother_of", ("brother_of", "sibling_of")),
    ("sister_of", ("sister_of", "sibling_of")),
    ("grandparent_of", ("parent_of", "parent_of")),
    ("grandparent_of", ("grandparent_of", "sibling_of")),
    ("grandparent_of", ("spouse_of", "grandparent_of")),
    ("great_grandparent_of", ("parent_of", "grandparent_of")),
    ("great_grandparent_of", ("grandparent_of", "parent_of")),
    ("great_grandparent_of", ("great_grandparent_of", "sibling_of")),
    ("great_grandparent_of", ("spouse_of", "great_grandparent_of")),
    ("aunt_or_uncle_of", ("sibling_of", "parent_of")),
    ("aunt_or_uncle_of", ("spouse_of", "aunt_or_uncle_of")),
    ("aunt_or_uncle_of", ("aunt_or_uncle_of", "sibling_of")),
    ("aunt_or_uncle_of", ("~niece_or_nephew_of",)),
    ("niece_or_nephew_of", ("~aunt_or_uncle_of",)),
    ("cousin_of", ("~cousin_of",)),
    ("cousin_of", ("~aunt_or_uncle_of", "parent_of")),
    ("cousin_of", ("cousin_of", "sibling_of")),
)
"""(head, path): head(x, z) holds when the path leads from x to z and x is not z; "~r" walks relation r backwards.

Spouses share all their children and siblings share both parents, which is what makes all of these true. Aunts and
uncles are the siblings of a parent and the spouses of these.
"""

RELATIONS: tuple[str, ...] = tuple(sorted({head for head, _ in RULES}))

_WOMEN = (
    "ada alma anna astrid beatrice carla clara dora edith elena elsa emma eva frida greta hanna helen ida ines "
    "irene iris jane julia karin laura lea lena lina lucy maria marta mia mona nina nora olga paula rita rosa sara "
    "sofia tessa vera wilma"
)
_MEN = (
    "adam albert alex anton arthur aron ben bruno carl david emil erik felix finn frank georg hans henry hugo ivan "
    "jacob jan john jonas karl leo liam lukas marco mark martin max nils noah oscar otto paul peter robert samuel "
    "simon theo tom viktor"
)
_SURNAMES = (
    "miller adler baker bauer berg brown carter clark costa dahl evans fischer fontana garcia gruber hansen hill holm "
    "jensen keller klein lang larsen lopez meyer moreau nowak olsen parker petrov quinn rossi santos schmidt silva "
    "stone taylor turner vogel wagner walker weber winter young"
)

_CHILDREN = (2, 3)
_MARRIED = (0.75, 0.5)  # chance that a child of generation 1, 2 marries; a first child always does


def family_triples(*, num_families: int = 30, seed: int = 0) -> dict[str, list[Triple]]:
    """Make the built-in graph: splits train, valid and test of (source, relation, target) labels.

    Each split is sorted. The output depends on the arguments alone, not on the machine or the Python version.
    """
    if num_families < 1:
        raise ValueError(f"num_families must be at least 1, got {num_families}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    rng = random.Random(seed)
    labels: set[str] = set()
    facts = _Facts()
    for _, surname in zip(range(num_families), cycle(_SURNAMES.split()), strict=False):
        facts.update(sorted(_close(_Family(rng, surname, labels).grow())))  # sets have no fixed order
    return _split(facts, rng)


class _Family:
    """Grows one family; `base` holds the facts from which RULES give all others."""

    def __init__(self, rng: random.Random, surname: str, labels: set[str]) -> None:
        self.rng = rng
        self.surname = surname
        self.labels = labels
        self.names = {"f": _shuffled(_WOMEN.split(), rng), "m": _shuffled(_MEN.split(), rng)}
        self.base: list[Triple] = []

    def grow(self) -> list[Triple]:
        couples = [self.couple(self.person("f"), self.person("m"))]
        for chance in (*_MARRIED, 0.0):
            couples = [pair for couple in couples for pair in self.children(*couple, chance)]
        return self.base

    def children(self, mother: str, father: str, chance: float) -> list[tuple[str, str]]:
        """Add the children of a couple and return the couples that they form in turn."""
        low, high = _CHILDREN
        sexes = ["fm"[_below(2, self.rng)] for _ in range(low + _below(high - low + 1, self.rng))]
        people = [self.person(sex) for sex in sexes]
        couples = []
        for place, (child, sex) in enumerate(zip(people, sexes, strict=True)):
            self.base += [(mother, "mother_of", child), (father, "father_of", child)]
            relation = "sister_of" if sex == "f" else "brother_of"
            self.base += [(child, relation, other) for other in people if other != child]
            if chance > 0 and (place == 0 or self.rng.random() < chance):
                couples.append(
                    self.couple(child, self.person("m")) if sex == "f" else self.couple(self.person("f"), child)
                )
        return couples

    def couple(self, wife: str, husband: str) -> tuple[str, str]:
        self.base.append((wife, "spouse_of", husband))
        return wife, husband

    def person(self, sex: str) -> str:
        """Return a label nobody has; first names come round again when a family has used them all."""
        first = self.names[sex].pop(0)
        self.names[sex].append(first)
        stem = label = f"{first}_{self.surname}"
        number = 1
        while label in self.labels:
            number += 1
            label = f"{stem}_{number}"
        self.labels.add(label)
        return label


class _Facts:
    """A set of triples that also answers: where does one step along a relation lead?"""

    def __init__(self, triples: Iterable[Triple] = ()) -> None:
        self.triples: set[Triple] = set()
        self._steps: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        self.update(triples)

    def update(self, triples: Iterable[Triple]) -> None:
        for triple in triples:
            if triple not in self.triples:
                self.triples.add(triple)
                source, relation, target = triple
                self._steps[source, relation].append(target)
                self._steps[target, "~" + relation].append(source)

    def proofs(self, source: str, path: tuple[str, ...]) -> list[tuple[str, list[Triple]]]:
        """List (end, triples walked) for every way along `path` from `source` that ends elsewhere."""
        ways: list[tuple[str, list[Triple]]] = [(source, [])]
        for step in path:
            ways = [
                (end, [*walked, _walked(here, step, end)])
                for here, walked in ways
                for end in self._steps.get((here, step), ())
            ]
        return [way for way in ways if way[0] != source]


def _walked(here: str, step: str, end: str) -> Triple:
    return (end, step[1:], here) if step.startswith("~") else (here, step, end)


def _close(base: list[Triple]) -> set[Triple]:
    """Return `base` and all that follows from it by RULES."""
    facts = _Facts(base)
    people = sorted({label for source, _, target in base for label in (source, target)})
    size = -1
    while size != len(facts.triples):
        size = len(facts.triples)
        for head, path in RULES:
            for source in people:
                facts.update([(source, head, end) for end, _ in facts.proofs(source, path)])
    return facts.triples


def _split(facts: _Facts, rng: random.Random) -> dict[str, list[Triple]]:
    """Hold out a share of each relation.

    A held-out fact keeps one proof in train, whose facts are then never held out. Two people lose at most one fact
    between them, so that what is left still tells an embedding how they are related.
    """
    total = Counter(relation for _, relation, _ in facts.triples)
    room = {
        name: {relation: count // HELD_OUT_ONE_IN for relation, count in total.items()} for name in ("valid", "test")
    }
    splits: dict[str, list[Triple]] = {"train": [], "valid": [], "test": []}
    needed: set[Triple] = set()
    held_out: set[Triple] = set()
    pairs: set[frozenset[str]] = set()
    for triple in _shuffled(sorted(facts.triples), rng):
        relation = triple[1]
        name = max(room, key=lambda split: room[split][relation])
        if room[name][relation] == 0 or triple in needed:
            continue
        pair = frozenset((triple[0], triple[2]))
        proof = None if pair in pairs else _proof(triple, facts, held_out)
        if proof is not None:
            pairs.add(pair)
            needed.update(proof)
            held_out.add(triple)
            room[name][relation] -= 1
            splits[name].append(triple)
    splits["train"] = list(facts.triples - held_out)
    return {name: sorted(triples) for name, triples in splits.items()}


def _proof(triple: Triple, facts: _Facts, held_out: set[Triple]) -> list[Triple] | None:
    """Return the body of a rule that gives `triple` without it and without held-out facts, or None."""
    source, relation, target = triple
    for head, path in RULES:
        if head == relation:
            for end, body in facts.proofs(source, path):
                if end == target and triple not in body and held_out.isdisjoint(body):
                    return body
    return None


def _below(bound: int, rng: random.Random) -> int:
    # random() is the one method whose sequence Python promises to keep for a seed.
    return int(rng.random() * bound)


def _shuffled(items: Iterable[_T], rng: random.Random) -> list[_T]:
    items = list(items)
    for last in range(len(items) - 1, 0, -1):
        other = _below(last + 1, rng)
        items[last], items[other] = items[other], items[last]
    return items


def ensure_family_graph() -> Path:
    """Give the path of the built-in graph in the cache folder, making it first where it is not there yet.

    Several processes may call this at once: each builds its own beside the place, and the first to finish wins.
    """
    graph = cache_folder() / f"families-v{FAMILIES_VERSION}"
    if is_graph(graph):
        return graph
    try:
        _make_graph(graph)
    except (IngestError, OSError) as error:
        if not is_graph(graph):  # otherwise another process was first
            reason = error.strerror if isinstance(error, OSError) else error
            raise IngestError(
                f"cannot make the built-in graph {graph.name} in the cache folder {graph.parent}: {reason}. "
                f"Mend that, or set {CACHE_VARIABLE} to another folder that can be written"
            ) from error
    return graph


def _make_graph(graph: Path) -> None:
    if graph.is_file() or (graph.is_dir() and any(graph.iterdir())):
        raise IngestError(f"{graph} is there already but is not a whole graph; delete it")
    with tempfile.TemporaryDirectory() as folder:
        for split, triples in family_triples().items():
            lines = ["\t".join(triple) + "\n" for triple in triples]
            (Path(folder) / f"{split}.tsv").write_text("".join(lines), encoding="utf-8", newline="")
        ingest_triples([folder], options=IngestOptions(out=graph, name="families", format="tsv"))
