"""SOC evaluates in three times the plain convolution's time: one Fourier product instead of twelve convolutions.

python benchmarks/performance/soc.py
"""

from lipkit.benchmark.claim import show
from lipkit.benchmark.run import Plan

if __name__ == "__main__":
    show(__doc__, Plan(families=("soc",), parts=("layers",)))
