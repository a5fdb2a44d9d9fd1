"""The hash split against hashlib, and its repair against a search over all triples."""

import random
from dataclasses import replace

import pytest

from ingest import IngestError, IngestOptions, ingest_triples
from ingest.options import parse_size
from ingest.places import split_of, words
from tests.ingest_reference import check_index, labelled, manifest


def write(path, triples):
    path.write_bytes("".join("\t".join(triple) + "\n" for triple in triples).encode())
    return path


def repaired(triples, options):
    """Split by hash, then give train the smallest held-out triple of everything it lacks; in plain Python."""
    splits = {"train": set(), "valid": set(), "test": set()}
    for triple in triples:
        splits[split_of(*triple, options)].add(triple)
    known = {("e", e) for s, _, t in splits["train"] for e in (s, t)} | {("r", r) for _, r, _ in splits["train"]}
    held = sorted(splits["valid"] | splits["test"], key=lambda triple: [label.encode() for label in triple])
    first = {}
    for s, r, t in held:
        for thing in (("e", s), ("r", r), ("e", t)):
            first.setdefault(thing, (s, r, t))
    moved = {triple for thing, triple in first.items() if thing not in known}
    counts = {split: len(splits[split] & moved) for split in ("valid", "test")}
    return {
        "train": splits["train"] | moved,
        "valid": splits["valid"] - moved,
        "test": splits["test"] - moved,
    }, counts


def test_the_hash_is_the_documented_one():
    digest = bytes.fromhex(PARIS)
    assert words("entity", "Paris", 7) == (int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


# printf '7\nentity\nParis' | md5sum
PARIS = "f3c4aac9e3c51139a92ede92baa500c7"


@pytest.mark.parametrize("seed", range(6))
def test_split_and_repair_equal_the_reference(seed, tmp_path):
    rng = random.Random(seed)
    triples = [
        (f"e{min(rng.randrange(70), rng.randrange(70))}é", f"r {rng.randrange(6)}", f"e{rng.randrange(70)}é")
        for _ in range(120)
    ]
    options = IngestOptions(out=tmp_path / "graph", seed=seed, valid_fraction=0.25, test_fraction=0.2)
    ingest_triples([write(tmp_path / "t.tsv", triples)], options=options)
    expected, moved = repaired(triples, options)
    found = labelled(tmp_path / "graph")
    assert found == expected
    assert moved["valid"] + moved["test"] > 0, "the example must need a repair"
    assert manifest(tmp_path / "graph")["split"]["moved_to_train"] == moved
    for column in (0, 1, 2):
        role = {0, 2} if column != 1 else {1}
        known = {triple[place] for triple in found["train"] for place in role}
        assert {triple[column] for triple in found["valid"] | found["test"]} <= known
    check_index(tmp_path / "graph")


def test_given_splits_are_kept_even_where_train_lacks_an_entity(tmp_path):
    files = {
        "train": write(tmp_path / "a.tsv", [("a", "r", "b")]),
        "valid": write(tmp_path / "b.tsv", [("x", "q", "b")]),
        "test": write(tmp_path / "c.tsv", [("a", "r", "b"), ("a", "r", "b")]),
    }
    ingest_triples(**{split: [path] for split, path in files.items()}, options=IngestOptions(out=tmp_path / "g"))
    assert labelled(tmp_path / "g") == {
        "train": {("a", "r", "b")},
        "valid": {("x", "q", "b")},
        "test": {("a", "r", "b")},
    }
    assert manifest(tmp_path / "g")["lines"]["duplicates"] == 1
    assert manifest(tmp_path / "g")["split"] == {"how": "given"}


@pytest.mark.parametrize(
    ("valid", "test", "message"),
    [
        (0.6, 0.6, "nearest possible: --valid-fraction 0.49"),
        (1.0, 0.0, "--valid-fraction must be at least 0 and below 1, got 1.0; nearest possible: 0.99"),
        (0.0, -0.5, "--test-fraction must be at least 0 and below 1, got -0.5; nearest possible: 0"),
        (float("nan"), None, "got nan"),
        (0.97, None, "--test-fraction 0.05 leave nothing to train on"),
    ],
)
def test_impossible_fractions_are_explained(valid, test, message):
    with pytest.raises(IngestError) as error:
        IngestOptions(valid_fraction=valid, test_fraction=test).check()
    assert message in str(error.value)


def test_a_split_that_comes_out_empty_is_refused_with_one_that_does_not(tmp_path):
    ring = write(tmp_path / "t.tsv", [(f"e{i}", "r", f"e{(i + j) % 12}") for i in range(12) for j in (1, 2)])
    options = IngestOptions(out=tmp_path / "g", valid_fraction=0.001, test_fraction=0.0)
    with pytest.raises(
        IngestError, match=r"valid has 0 of 24 triples.*nearest possible: --valid-fraction [0-9.]+$"
    ) as error:
        ingest_triples([ring], options=options)
    assert list(tmp_path.iterdir()) == [ring]
    nearest = float(str(error.value).split()[-1])
    ingest_triples([ring], options=replace(options, valid_fraction=nearest))
    assert manifest(tmp_path / "g")["splits"]["valid"]["triples"] > 0


def test_nothing_can_be_held_out_of_a_graph_where_every_entity_occurs_once(tmp_path):
    pairs = write(tmp_path / "t.tsv", [(f"a{i}", "r", f"b{i}") for i in range(50)])
    options = IngestOptions(out=tmp_path / "g", valid_fraction=0.2, test_fraction=0.2)
    with pytest.raises(IngestError, match="nearest possible: --valid-fraction 0 --test-fraction 0"):
        ingest_triples([pairs], options=options)
    report = ingest_triples([pairs], options=replace(options, valid_fraction=None, test_fraction=None))
    assert report.manifest["splits"]["train"]["triples"] == 50, "without a request all goes to train, with a warning"
    assert any("went to train" in warning for warning in report.warnings)


def test_the_nearest_possible_fractions_are_possible():
    with pytest.raises(IngestError) as error:
        IngestOptions(valid_fraction=0.7, test_fraction=0.7).check()
    words = str(error.value).split()
    valid, test = float(words[words.index("--valid-fraction", 5) + 1]), float(words[-1])
    IngestOptions(valid_fraction=valid, test_fraction=test).check()


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4 * 10**9), ("512MiB", 512 << 20), ("1e9", 10**9), ("1.5 g", 1_500_000_000), ("77", 77)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "4 apples", "-1GB", "1.2.3GB", "4iB", "1e999"])
def test_bad_sizes(text):
    with pytest.raises(IngestError, match="is not a size"):
        parse_size(text)
