"""The layers as their papers print them, against lipkit's and the plain convolution.

    python benchmarks/textbook.py

The implementations stand in `lipkit.benchmark.textbook`, so that `lipkit bench` has them where only the wheel is
installed: Cayley and sandwich layers by complex FFTs of the padded kernel, permuted copies and `torch.linalg.inv` in
every pass, SOC as one convolution per Taylor term, ECO as one dilated convolution. The claim: Cayley takes at most a
fifth (batch 32) and a third (batch 128) of the textbook's training step, a twelfth and a sixth of its evaluation.
"""

from lipkit.benchmark.claim import show
from lipkit.benchmark.run import Plan
from lipkit.benchmark.textbook import LAYERS

if __name__ == "__main__":
    show(__doc__, Plan(families=tuple(LAYERS), parts=("layers",)))
