"""Cayley layers are faster than a plain convolution: training step 0.9 at batch 128 and c >= 64, exported 0.5.

python benchmarks/performance/cayley.py
"""

from lipkit.benchmark.claim import show
from lipkit.benchmark.run import Plan

if __name__ == "__main__":
    show(__doc__, Plan(families=("cayley",), parts=("layers",)))
