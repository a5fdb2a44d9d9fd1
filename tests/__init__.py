import os

# Some hypervisors announce AMX and refuse it: a bfloat16 product then fails or kills its process, in a test that calls
# it without asking first (sattle_dist.precision). Set before torch is imported; other CPUs are not concerned.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
