"""A Cayley layer needs at most four times the memory of a plain convolution in training, twice exported.

python benchmarks/performance/memory.py
"""

from lipkit.benchmark.claim import show
from lipkit.benchmark.run import Plan

if __name__ == "__main__":
    show(__doc__, Plan(families=("cayley",), parts=("memory",)))
