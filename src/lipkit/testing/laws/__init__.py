"""Tests of the laws: each takes a :class:`~lipkit.testing.case.Case` and returns figures or raises ``LawBroken``."""
