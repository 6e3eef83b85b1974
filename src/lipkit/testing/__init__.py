"""The thirteen laws that every constrained layer obeys, as a public check that also takes third-party layers.

>>> from functools import partial
>>> from lipkit.layers import CayleyLinear
>>> measured = check_layer(partial(CayleyLinear, 4, 6), input_shape=(4,), laws=(1, 2, 4))
>>> sorted(measured), round(measured[2]["smallest"], 6)
([1, 2, 4], 1.0)
"""

from lipkit.testing.case import Case, LawBroken, Refusal, conv_options, conv_refusals, linear_options, linear_refusals
from lipkit.testing.check import LAWS, Law, check_layer, run_law
from lipkit.testing.reference import dense_matrix, is_affine, jacobians, tolerance

__all__ = ["LAWS", "Case", "Law", "LawBroken", "Refusal", "check_layer", "run_law"]
__all__ += ["conv_options", "conv_refusals", "linear_options", "linear_refusals"]  # arguments of torch's layers
__all__ += ["dense_matrix", "is_affine", "jacobians", "tolerance"]  # references

__dir__ = __all__.copy
