"""A graph grows without moving what is in it."""

from collections import Counter
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from ingest import IngestError, IngestOptions, ingest_triples
from ingest.manifest import read_manifest, verify
from ingest.places import split_of
from tests.ingest_reference import check_degrees, check_index, labelled, labels, manifest

FIRST = [(f"e{i:02}", f"r{i % 3}", f"e{(i * 7 + 1) % 40:02}") for i in range(40)]
MORE = [("e01", "r0", "a-new"), ("zz", "q-new", "e05"), ("e00", "r0", "e01"), ("e10", "r2", "e03")]


def write(path, triples):
    path.write_text("".join("\t".join(triple) + "\n" for triple in triples))
    return path


@pytest.fixture
def graph(tmp_path):
    out = tmp_path / "graph"
    options = IngestOptions(out=out, seed=5, valid_fraction=0.2, test_fraction=0.1)
    ingest_triples([write(tmp_path / "first.tsv", FIRST)], options=options)
    return out


def test_ids_and_splits_stay_and_new_ones_follow(graph, tmp_path):
    before, entities, relations = labelled(graph), labels(graph, "entities"), labels(graph, "relations")
    counted = manifest(graph)["lines"]
    report = ingest_triples([write(tmp_path / "more.tsv", MORE)], options=IngestOptions(append_to=graph))
    assert report.path == graph
    assert labels(graph, "entities") == [*entities, "a-new", "zz"]
    assert labels(graph, "relations") == [*relations, "q-new"]
    after = labelled(graph)
    for split in after:
        assert before[split] <= after[split]
    assert set.union(*after.values()) == {*FIRST, *MORE}
    assert sum(len(part) for part in after.values()) == len({*FIRST, *MORE}), "no triple is in two splits"
    lines = manifest(graph)["lines"]
    assert lines["read"] == counted["read"] + 4
    assert lines["duplicates"] == counted["duplicates"] + len(set(FIRST) & set(MORE))
    assert manifest(graph)["name"] == "graph"
    assert [source["path"] for source in manifest(graph)["made_by"]["inputs"]] == [
        str(tmp_path / "first.tsv"),
        str(tmp_path / "more.tsv"),
    ]
    check_index(graph)
    check_degrees(graph)
    verify(graph, read_manifest(graph))


def test_new_triples_are_split_as_the_old_ones_were(graph, tmp_path):
    """Appending in two steps gives the splits of one ingest, where nothing has to be moved to train."""
    more = [(f"e{i:02}", "r1", f"e{(i * 11 + 5) % 40:02}") for i in range(40)]
    ingest_triples([write(tmp_path / "more.tsv", more)], options=IngestOptions(append_to=graph))
    options = IngestOptions(out=tmp_path / "at-once", seed=5, valid_fraction=0.2, test_fraction=0.1)
    ingest_triples([write(tmp_path / "all.tsv", FIRST + more)], options=options)
    grown, at_once = labelled(graph), labelled(tmp_path / "at-once")
    # Triples that the first ingest had to move to train stay there; nothing else may differ.
    assert at_once["valid"] >= grown["valid"]
    assert (at_once["valid"] - grown["valid"]) <= set(FIRST)
    assert {triple for triple in grown["valid"] | grown["test"] if triple in more}, "the example must hold some out"


def test_appending_what_is_there_changes_nothing(graph, tmp_path):
    before = manifest(graph)
    ingest_triples([tmp_path / "first.tsv"], options=IngestOptions(append_to=graph))
    after = manifest(graph)
    assert after["checksum"] == before["checksum"]
    assert after["lines"]["duplicates"] == before["lines"]["duplicates"] + len(FIRST)


def test_a_name_that_looks_like_a_pattern_is_a_name(graph, tmp_path):
    (tmp_path / "g1").mkdir()
    ingest_triples(
        [write(tmp_path / "other.tsv", [("x", "y", "z")])], options=IngestOptions(out=tmp_path / "g1", force=True)
    )
    odd = graph.rename(tmp_path / "g[1]")
    ingest_triples([write(tmp_path / "more.tsv", MORE)], options=IngestOptions(append_to=odd))
    assert set.union(*labelled(odd).values()) == {*FIRST, *MORE}


def test_a_graph_that_another_process_has_grown_meanwhile_is_left(graph, tmp_path):
    """Else what that one has added would be lost."""
    more, other = write(tmp_path / "more.tsv", MORE), write(tmp_path / "other.tsv", [("e00", "r0", "other")])
    ingested = []

    def grow(stage, count):
        if stage == "labels" and not ingested:
            ingested.append(ingest_triples([other], options=IngestOptions(append_to=graph)))

    with pytest.raises(IngestError, match="was changed by another process meanwhile"):
        ingest_triples([more], options=IngestOptions(append_to=graph), progress=grow)
    assert manifest(graph)["checksum"] == ingested[0].manifest["checksum"]
    assert set.union(*labelled(graph).values()) == {*FIRST, ("e00", "r0", "other")}


def test_triples_moved_to_train_are_counted_with_those_before(graph, tmp_path):
    before = manifest(graph)["split"]["moved_to_train"]
    more = [(f"n{i}", "r0", f"m{i}") for i in range(40)]  # each alone with its entities, so none can be held out
    ingest_triples([write(tmp_path / "more.tsv", more)], options=IngestOptions(append_to=graph))
    after = manifest(graph)["split"]["moved_to_train"]
    options = IngestOptions(seed=5, valid_fraction=0.2, test_fraction=0.1)
    moved = Counter(split_of(*triple, options) for triple in more)
    assert moved["valid"] * moved["test"] > 0
    assert after == {split: before[split] + moved[split] for split in before}


def test_fractions_that_leave_nothing_with_those_of_before_are_refused(graph, tmp_path):
    more = write(tmp_path / "more.tsv", MORE)
    with pytest.raises(IngestError, match=r"--valid-fraction 0.2 and --test-fraction 0.9 leave nothing to train on"):
        ingest_triples([more], options=IngestOptions(append_to=graph, test_fraction=0.9))
    given = IngestOptions(out=tmp_path / "given")
    ingest_triples(train=[tmp_path / "first.tsv"], options=given)
    ingest_triples([more], options=IngestOptions(append_to=tmp_path / "given", test_fraction=0.96))  # and none to valid


@pytest.mark.parametrize("where", ["absolute", "relative"])
def test_a_graph_behind_a_link_is_grown(graph, tmp_path, where):
    link = tmp_path / "link"
    link.symlink_to(graph if where == "absolute" else graph.name)
    before = manifest(graph)["splits"]["train"]["triples"]
    more = write(tmp_path / "more.tsv", MORE)
    ingest_triples(train=[more], options=IngestOptions(append_to=link))
    assert link.is_symlink()
    assert manifest(graph)["splits"]["train"]["triples"] > before
    ingest_triples([more], options=IngestOptions(out=link, force=True))
    assert link.is_symlink()
    assert manifest(graph)["lines"]["read"] == len(MORE)


def test_given_splits_and_another_place(graph, tmp_path):
    before = manifest(graph)
    ingest_triples(
        train=[write(tmp_path / "a.tsv", [("e00", "r0", "n1")])],
        test=[write(tmp_path / "b.tsv", [("n2", "r0", "e00"), FIRST[0]])],
        options=IngestOptions(append_to=graph, out=tmp_path / "grown"),
    )
    assert manifest(graph) == before
    grown = labelled(tmp_path / "grown")
    assert ("n2", "r0", "e00") in grown["test"], "a given split is kept"
    assert sum(FIRST[0] in part for part in grown.values()) == 1, "a triple of the old graph keeps its split"
    check_index(tmp_path / "grown")


def test_rejects_of_both_are_kept(tmp_path):
    options = IngestOptions(out=tmp_path / "g", on_reject="skip")
    (tmp_path / "a.tsv").write_text("a\tr\tb\nbad\n")
    (tmp_path / "b.tsv").write_text("c\tr\tb\nworse\n")
    ingest_triples([tmp_path / "a.tsv"], options=options)
    ingest_triples([tmp_path / "b.tsv"], options=replace(options, out=None, append_to=tmp_path / "g"))
    assert pq.read_table(tmp_path / "g" / "rejects.parquet")["text"].to_pylist() == [b"bad", b"worse"]
    assert manifest(tmp_path / "g")["lines"]["rejected"] == 2


def test_a_failed_append_leaves_the_graph(graph, tmp_path):
    before = manifest(graph)
    (tmp_path / "bad.tsv").write_text("only one field\n")
    with pytest.raises(IngestError, match="malformed"):
        ingest_triples([tmp_path / "bad.tsv"], options=IngestOptions(append_to=graph))
    with pytest.raises(IngestError, match="leave --seed out"):
        ingest_triples([tmp_path / "first.tsv"], options=IngestOptions(append_to=graph, seed=9))
    assert manifest(graph) == before
    (graph / "entities.parquet").unlink()
    with pytest.raises(IngestError, match=r"damaged: entities.parquet is missing"):
        ingest_triples([tmp_path / "first.tsv"], options=IngestOptions(append_to=graph))
