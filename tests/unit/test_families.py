"""The built-in graph: true by the definitions of kinship, held-out facts provable from train, the same everywhere."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from ingest import IngestError, families
from ingest.cache import cache_folder
from ingest.families import FAMILIES_VERSION, RELATIONS, RULES, ensure_family_graph, family_triples

HELD_OUT = ("valid", "test")


@pytest.fixture(scope="module")
def splits():
    return family_triples()


def pairs_by_relation(triples):
    pairs = defaultdict(set)
    for source, relation, target in triples:
        pairs[relation].add((source, target))
    return pairs


def compose(first, second):
    by_source = defaultdict(set)
    for y, z in second:
        by_source[y].add(z)
    return {(x, z) for x, y in first for z in by_source[y]}


def inverse(pairs):
    return {(y, x) for x, y in pairs}


def distinct(pairs):
    return {(x, y) for x, y in pairs if x != y}


def one_step(triples):
    """Apply every rule once to `triples`, as plain products of relations."""
    pairs = pairs_by_relation(triples)
    derived = set()
    for head, path in RULES:
        steps = [inverse(pairs[step[1:]]) if step[0] == "~" else pairs[step] for step in path]
        reached = steps[0]
        for step in steps[1:]:
            reached = compose(reached, step)
        derived |= {(x, head, y) for x, y in distinct(reached)}
    return derived


def test_every_held_out_fact_follows_from_train_in_one_step(splits):
    derived = one_step(splits["train"])
    for name in HELD_OUT:
        assert splits[name]
        assert set(splits[name]) <= derived


def test_closure_of_train_is_the_whole_graph_and_nothing_else(splits):
    known = set(splits["train"])
    while not (new := one_step(known)) <= known:
        known |= new
    assert known == {triple for triples in splits.values() for triple in triples}


def test_facts_agree_with_the_definitions_of_kinship(splits):
    """Recompute every relation from mothers, fathers and marriages alone, without RULES."""
    facts = pairs_by_relation(triple for triples in splits.values() for triple in triples)
    parent = facts["mother_of"] | facts["father_of"]
    sibling = distinct(compose(inverse(facts["mother_of"]), facts["mother_of"]))
    by_blood = compose(sibling, parent)
    aunt_or_uncle = by_blood | compose(facts["spouse_of"], by_blood)
    expected = {
        "parent_of": parent,
        "child_of": inverse(parent),
        "spouse_of": distinct(compose(parent, inverse(parent))),  # every couple has children
        "sibling_of": sibling,
        "grandparent_of": compose(parent, parent),
        "great_grandparent_of": compose(compose(parent, parent), parent),
        "aunt_or_uncle_of": aunt_or_uncle,
        "niece_or_nephew_of": inverse(aunt_or_uncle),
        "cousin_of": compose(compose(inverse(parent), sibling), parent),
    }
    for relation, pairs in expected.items():
        assert facts[relation] == pairs, relation
    assert facts["brother_of"] | facts["sister_of"] == sibling
    women = {x for relation in ("mother_of", "sister_of") for x, _ in facts[relation]}
    men = {x for relation in ("father_of", "brother_of") for x, _ in facts[relation]}
    assert women.isdisjoint(men)
    assert set(facts) == set(RELATIONS) == {*expected, "mother_of", "father_of", "brother_of", "sister_of"}


def test_family_shape(splits):
    facts = pairs_by_relation(triple for triples in splits.values() for triple in triples)
    for relation in ("mother_of", "father_of"):
        assert set(Counter(child for _, child in facts[relation]).values()) == {1}
    assert set(Counter(x for x, _ in facts["spouse_of"]).values()) == {1}
    surnames = {x.split("_")[1] for x, _ in facts["great_grandparent_of"]}
    assert len(surnames) == 30  # each family reaches its fourth generation
    for pairs in facts.values():
        assert all(x.split("_")[1] == y.split("_")[1] for x, y in pairs)


def test_splits_are_disjoint_sorted_and_covered_by_train(splits):
    assert list(splits) == ["train", "valid", "test"]
    everything = [triple for triples in splits.values() for triple in triples]
    assert len(set(everything)) == len(everything)
    assert all(triples == sorted(triples) for triples in splits.values())
    train_people = {label for source, _, target in splits["train"] for label in (source, target)}
    train_relations = {relation for _, relation, _ in splits["train"]}
    total = Counter(relation for _, relation, _ in everything)
    for name in HELD_OUT:
        assert {label for source, _, target in splits[name] for label in (source, target)} <= train_people
        counts = Counter(relation for _, relation, _ in splits[name])
        assert set(counts) <= train_relations
        assert counts == {relation: count // 20 for relation, count in total.items()}  # 5 %


def test_two_people_lose_at_most_one_fact_between_them(splits):
    pairs = Counter(frozenset((source, target)) for name in HELD_OUT for source, _, target in splits[name])
    assert max(pairs.values()) == 1


def test_labels_are_readable_and_unsuffixed_in_the_default_graph(splits):
    people = {label for source, _, target in splits["train"] for label in (source, target)}
    assert 600 <= len(people) <= 1000
    assert all(re.fullmatch(r"[a-z]+_[a-z]+", label) for label in people)


def test_suffixes_keep_people_apart_when_surnames_run_out():
    num_families = 2 * len(families._SURNAMES.split())
    triples = [t for split in family_triples(num_families=num_families).values() for t in split]
    people = {label for source, _, target in triples for label in (source, target)}
    assert any(label.endswith("_2") for label in people)
    assert all(re.fullmatch(r"[a-z]+_[a-z]+(_[2-9])?", label) for label in people)
    for label in people:
        if re.search(r"_\d$", label):
            assert re.sub(r"_\d$", "", label) in people  # a suffix only when the plain label is taken
    mothers = Counter(child for _, relation, child in triples if relation == "mother_of")
    assert set(mothers.values()) == {1}  # nobody was merged with a namesake


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_family_is_enough(seed):
    splits = family_triples(num_families=1, seed=seed)
    derived = one_step(splits["train"])
    assert set(splits["valid"]) | set(splits["test"]) <= derived
    assert {relation for _, relation, _ in splits["train"]} == set(RELATIONS)


def digest(splits):
    lines = [f"{name}\t" + "\t".join(triple) for name, triples in splits.items() for triple in triples]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def test_output_is_pinned_to_its_version(splits):
    """When this fails because the generator changed on purpose: raise FAMILIES_VERSION and pin the new digest."""
    assert (FAMILIES_VERSION, digest(splits)) == (1, "fe007fd80847ccb4d611b7213f2ca537300b83e40b77a4dd5796753aef6dd10c")


def test_output_does_not_depend_on_string_hashing(splits):
    code = "from tests.unit.test_families import *; print(digest(family_triples()))"
    for hash_seed in ("1", "2"):
        root = Path(__file__).parents[2]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == digest(splits)


def test_only_the_stable_method_of_random_is_used(splits, monkeypatch):
    class OnlyRandom:
        def __init__(self, seed):
            self.random = random.Random(seed).random

    monkeypatch.setattr(families, "random", SimpleNamespace(Random=OnlyRandom))
    assert family_triples() == splits


def test_seed_changes_the_graph(splits):
    assert family_triples(seed=1) != splits


@pytest.mark.parametrize(("argument", "value", "bound"), [("num_families", 0, 1), ("seed", -1, 0)])
def test_bad_arguments_are_refused(argument, value, bound):
    with pytest.raises(ValueError, match=f"{argument} must be at least {bound}, got {value}"):
        family_triples(**{argument: value})


def labelled(graph, split):
    """Read a split back as labels, from the Parquet files."""
    people = pq.read_table(graph / "entities.parquet")["label"].to_pylist()
    relations = pq.read_table(graph / "relations.parquet")["label"].to_pylist()
    parts = [pq.ParquetFile(file).read() for file in (graph / "triples" / f"split={split}").glob("*.parquet")]
    rows = [row for part in parts for row in part.to_pylist()]
    return sorted((people[row["source"]], relations[row["relation"]], people[row["target"]]) for row in rows)


def test_graph_is_made_once_and_holds_the_triples(splits, tmp_path, monkeypatch):
    monkeypatch.setenv("SATTLE_CACHE", str(tmp_path / "new" / "cache"))
    graph = ensure_family_graph()
    assert graph == tmp_path / "new" / "cache" / "families-v1"
    assert {name: labelled(graph, name) for name in splits} == splits
    manifest = json.loads((graph / "manifest.json").read_text())
    assert manifest["name"] == "families"
    assert manifest["lines"]["duplicates"] == manifest["lines"]["rejected"] == 0
    assert len(np.load(graph / "index" / "split=test" / "targets.npy")) == 2 * len(splits["test"])
    assert os.listdir(graph.parent) == [graph.name]  # nothing is left beside it

    def fail(*args, **kwargs):
        pytest.fail("made again")

    monkeypatch.setattr(families, "ingest_triples", fail)
    assert ensure_family_graph() == graph


def test_processes_that_start_at_once_all_get_the_graph(tmp_path):
    code = "import sys; from ingest.families import *; sys.stdin.readline(); print(ensure_family_graph())"
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "SATTLE_CACHE": str(tmp_path), "PYTHONPATH": root}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        printed, _ = worker.communicate(timeout=120)
        assert worker.returncode == 0
        assert printed.strip() == str(tmp_path / "families-v1")
    assert os.listdir(tmp_path) == ["families-v1"]


def test_losing_the_race_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("SATTLE_CACHE", str(tmp_path))
    build = families.ingest_triples

    def build_second(*args, **kwargs):
        build(*args, **kwargs)  # the other process
        return build(*args, **kwargs)

    monkeypatch.setattr(families, "ingest_triples", build_second)
    assert (ensure_family_graph() / "manifest.json").is_file()


def test_cache_that_cannot_be_written_is_one_clear_line(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("SATTLE_CACHE", str(blocker / "cache"))
    with pytest.raises(IngestError, match="set SATTLE_CACHE to another folder") as caught:
        ensure_family_graph()
    assert str(blocker / "cache") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_cache_without_permission_is_one_clear_line(tmp_path, monkeypatch):
    for mode in (0o500, 0o000):
        cache = tmp_path / f"cache{mode}"
        cache.mkdir(mode=mode)
        monkeypatch.setenv("SATTLE_CACHE", str(cache))
        with pytest.raises(IngestError, match=f"{cache}: .*ermission denied.* set SATTLE_CACHE"):
            ensure_family_graph()


def test_half_a_graph_in_the_cache_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("SATTLE_CACHE", str(tmp_path))
    (tmp_path / "families-v1").mkdir()
    (tmp_path / "families-v1" / "entities.parquet").write_text("half")
    with pytest.raises(IngestError, match="families-v1 is there already but is not a whole graph; delete it"):
        ensure_family_graph()


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own"),
        ("", "/xdg", "/xdg/sattle-dist"),
        (None, "relative", "/home/eva/.cache/sattle-dist"),
        (None, None, "/home/eva/.cache/sattle-dist"),
    ],
)
def test_cache_folder(own, xdg, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/eva")
    for name, value in (("SATTLE_CACHE", own), ("XDG_CACHE_HOME", xdg)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


def test_no_home_folder_names_the_variable(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("SATTLE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(IngestError, match="set SATTLE_CACHE to a folder"):
        ensure_family_graph()
