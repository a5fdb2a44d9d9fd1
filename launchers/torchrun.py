"""torch's torchrun, leaving every option after the script to the script. `make install` makes it .venv/bin/torchrun.

The argparse of older Pythons, 3.11 among them, reads abbreviations even after the script, and refuses our `--nproc` there
as ambiguous between torchrun's own --nproc-per-node and --nproc_per_node. `torchrun -- launchers/train.py --nproc 4` is
the spelling that needs no such help.
"""

import argparse
import sys

from torch.distributed import run

make_parser = run.get_args_parser


def parser_without_abbreviations() -> argparse.ArgumentParser:
    parser = make_parser()
    parser.allow_abbrev = False
    return parser


if __name__ == "__main__":
    run.get_args_parser = parser_without_abbreviations
    sys.exit(run.main())
