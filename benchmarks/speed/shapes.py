"""The shapes that are measured, and how they are written: ``64->64s2@16``, ``128@16``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lipkit.errors import OptionError


@dataclass(frozen=True)
class Shape:
    """A convolution of ``cin -> cout`` channels and stride ``stride`` on ``side x side`` images.

    The kernel is 3. That of a strided constrained layer is 1, after the invertible downsampling, as in the networks
    (3 // 2, [Cayley] appendix E); the plain convolution beside it has 3 and the same stride.
    """

    cin: int
    cout: int
    side: int
    stride: int = 1

    @property
    def kernel(self) -> int:
        """Kernel size of the constrained layer."""
        return 3 if self.stride == 1 else 1

    @property
    def inner(self) -> int:
        """Channels after the invertible downsampling."""
        return self.cin * self.stride**2

    @property
    def out(self) -> int:
        """Height and width of the output."""
        return self.side // self.stride

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Shape of one input."""
        return (self.cin, self.side, self.side)

    def __str__(self) -> str:
        step = "" if self.stride == 1 else f"s{self.stride}"
        channels = str(self.cin) if self.cin == self.cout and not step else f"{self.cin}->{self.cout}"
        return f"{channels}{step}@{self.side}"


def parse(text: str) -> Shape:
    """The shape that ``text`` names.

    Raises:
        OptionError: it is not written as above, or the stride does not divide the side.

    >>> parse("32->64s2@16")
    Shape(cin=32, cout=64, side=16, stride=2)
    >>> str(parse("128->128@16"))
    '128@16'
    """
    found = re.fullmatch(r"(?:(\d+)->)?(\d+)(?:s(\d+))?@(\d+)", text.replace(" ", ""))
    values = [int(part) for part in found.groups(default="1")] if found else [0]
    if not found or min(values) < 1:
        raise OptionError(f"shape: expected CHANNELS@SIDE or IN->OUTsSTRIDE@SIDE such as 64->64s2@16, got {text!r}")
    cin, cout, stride, side = values
    if side % stride:
        raise OptionError(f"shape: expected a side that is a multiple of the stride {stride}, got {text!r}")
    return Shape(cin if found[1] else cout, cout, side, stride)


SHAPES = tuple(map(parse, ("3->32@32", "32->32s2@32", "32->64@16", "64->64s2@16", "128@16", "256@8", "512@4")))
ECO_SHAPES = tuple(
    map(parse, ("32@24", "64@12", "128@24", "128@12", "128@6", "256@12", "256@6", "512@6", "512@3"))
)  # 3 divides their sides
BATCHES = (32, 128)
PHASES = ("train", "forward")


def shapes_of(family: str) -> tuple[Shape, ...]:
    """The shapes at which a family is measured.

    >>> len(shapes_of("cayley")), len(shapes_of("eco"))
    (7, 9)
    """
    return ECO_SHAPES if family == "eco" else SHAPES
