"""Layers whose export is a kernel (BCOP, CayleyBCOP, RKO) evaluate as fast as the plain convolution they export to.

python benchmarks/performance/kernels.py
"""

from lipkit.benchmark.claim import show
from lipkit.benchmark.run import Plan

if __name__ == "__main__":
    show(__doc__, Plan(families=("bcop", "cayley_bcop", "rko"), phases=("forward",), parts=("layers",)))
