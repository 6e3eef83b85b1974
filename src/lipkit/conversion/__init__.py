"""Conversion of ordinary networks: their convolutions and dense layers replaced by constrained ones."""

from __future__ import annotations

from lipkit.conversion.convert import Conversion, Converted, Kept, convert

__all__ = ["Conversion", "Converted", "Kept", "convert"]
