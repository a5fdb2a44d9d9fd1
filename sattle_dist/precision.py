"""Whether this machine can multiply in bfloat16, found out where a crash does no harm."""

from __future__ import annotations

import subprocess
import sys

import torch

# Some CPUs announce instructions that their hypervisor refuses: the process dies of SIGILL, not of an exception. Others
# have none for bfloat16, and torch's way around is slower than float32.
_PROBE = """
import sys, time, torch

def fastest(dtype):
    x, seconds = torch.ones(256, 256, dtype=dtype), []
    for _ in range(10):
        started = time.perf_counter()
        y = x @ x
        seconds.append(time.perf_counter() - started)
    assert y[0, 0] == 256
    return min(seconds)

torch.set_num_threads(1)
sys.exit(SLOW if fastest(torch.bfloat16) > 2 * fastest(torch.float32) else 0)
"""
_SLOW = 3


def usable_precision(wanted: str, device: str) -> str:
    """Give the wanted precision, or float32 with a message where bf16 does not work on this device."""
    if wanted != "bf16":
        return wanted
    if device != "cpu" and torch.cuda.is_available():
        problem = "" if torch.cuda.is_bf16_supported() else "this GPU has no bfloat16 arithmetic"
    else:
        problem = _probe_cpu()
    if problem:
        print(f"--precision bf16 is not usable here ({problem}); going on in float32", file=sys.stderr)
        return "float32"
    return wanted


def _probe_cpu() -> str:
    try:
        probe = _PROBE.replace("SLOW", str(_SLOW))
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"trying it failed: {error}"
    if done.returncode < 0:
        return f"a bfloat16 product is killed by signal {-done.returncode}"
    if done.returncode == _SLOW:
        return "this CPU multiplies in bfloat16 more slowly than in float32"
    return "a bfloat16 product fails" if done.returncode else ""
