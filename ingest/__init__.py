"""Triples -> a graph directory (docs/graph-format.md), out of core, every line accounted for."""

from ingest.build import IngestReport, ingest_triples
from ingest.errors import IngestError
from ingest.options import IngestOptions

__all__ = ["IngestError", "IngestOptions", "IngestReport", "ingest_triples"]
