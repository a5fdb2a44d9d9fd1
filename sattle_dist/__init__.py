"""Exact 1-N training of SAttLE link-prediction embeddings over a row-sharded entity table."""

__version__ = "0.1.0"
