"""The tests of the laws, functions of a :class:`~lipkit.testing.case.Case`: what they measure, or ``LawBroken``."""
