"""The sandwich layer costs at most 2.2 Cayley layers.

python benchmarks/performance/sandwich.py
"""

from lipkit.benchmark.claim import show
from lipkit.benchmark.run import Plan

if __name__ == "__main__":
    show(__doc__, Plan(families=("cayley", "sandwich"), parts=("layers",)))
