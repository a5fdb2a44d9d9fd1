"""Exact 1-N training of SAttLE link-prediction embeddings over a row-sharded entity table.

from sattle_dist import load_run

run = load_run("runs/demo")
for p in run.predict(source="iris_baker", relation="mother_of", top=5):
    print(p.label, p.share, p.known_in)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sattle_dist.api import Run, load_run

__version__ = "0.1.0"
__all__ = ["Run", "load_run"]


def __getattr__(name: str) -> Any:
    # On first use: importing the package alone must not import torch, which takes seconds.
    if name in __all__:
        from sattle_dist import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
