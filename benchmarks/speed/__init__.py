"""How fast the layers are beside a plain convolution: work, clocks, checks, targets and tables."""
