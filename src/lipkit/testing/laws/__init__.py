"""The tests of the laws: each takes a :class:`~lipkit.testing.case.Case`; returns figures or raises ``LawBroken``."""
