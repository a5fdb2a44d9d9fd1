"""Whether this machine can multiply in bfloat16, found out where a crash does no harm."""

from __future__ import annotations

import subprocess
import sys

import torch

# Some CPUs announce instructions that their hypervisor refuses: the process dies of SIGILL, not of an exception.
_PROBE = """
import torch
x = torch.ones(256, 256, dtype=torch.bfloat16)
assert (x @ x)[0, 0] == 256
"""


def usable_precision(wanted: str, device: str) -> str:
    """Give the wanted precision, or float32 with a message where bf16 does not work on this device."""
    if wanted != "bf16":
        return wanted
    if device != "cpu" and torch.cuda.is_available():
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        problem = "" if supported else "this GPU has no instructions for it"
    else:
        problem = _probe_cpu()
    if problem:
        print(f"--precision bf16 is not usable here ({problem}); going on in float32", file=sys.stderr)
        return "float32"
    return wanted


def _probe_cpu() -> str:
    # By what the CPU says, not by a clock: the numbers of a run must not depend on how busy a machine is.
    if not any("bf16" in name and has_it for name, has_it in torch.cpu.get_capabilities().items()):
        return "this CPU has no instructions for it, and is slower without them than in float32"
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"trying it failed: {error}"
    if done.returncode < 0:
        return f"a bfloat16 product is killed by signal {-done.returncode}"
    return "a bfloat16 product fails" if done.returncode else ""
