"""Whole networks: KWLarge, LBDN small and LipConvnet-20 against the same networks of plain layers.

python benchmarks/performance/networks.py
"""

from lipkit.benchmark.claim import show
from lipkit.benchmark.run import Plan

if __name__ == "__main__":
    show(__doc__, Plan(batches=(128,), parts=("networks",)))
