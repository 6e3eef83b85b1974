"""The errors lipkit raises on purpose: one clear sentence each, with the expected and the actual value.

Every class also inherits the built-in exception a caller would expect, so that ``except ValueError`` works.
"""


class LipkitError(Exception):
    """Base of every error that lipkit raises on purpose; the command line prints its message alone."""


class NoRuleError(LipkitError, TypeError):
    """No proved rule covers a module: nothing is assumed to be 1-Lipschitz."""


class ShapeError(LipkitError, ValueError):
    """A tensor, kernel or image has a shape that the operation does not accept."""


class OptionError(LipkitError, ValueError):
    """A constructor or function argument has a value outside the documented ones."""


class DataError(LipkitError, ValueError):
    """A data set is missing, corrupt, or says something about itself that is not so."""


class RecipeError(LipkitError, ValueError):
    """A recipe or an override of it is not valid."""


class RunError(LipkitError, RuntimeError):
    """A run folder is missing, incomplete, already there, or does not fit the request."""


class CertificateViolation(LipkitError, RuntimeError):
    """An adversarial example lies inside a certified radius: the certificate, and so the bound, is wrong."""
