"""Data sets, checked when they are read: whole in memory, or image files that are decoded batch by batch.

Images are uint8 or floating point in [0, 1]; normalisation is a layer of the model. A file that is missing or damaged
raises ``DataError``.
"""

from lipkit.data.images import ImageFiles, random_crop, random_flip
from lipkit.data.registry import DATASETS, Entry, data_root, load
from lipkit.data.split import Data, Split, as_data, as_split

__all__ = ["DATASETS", "Entry", "data_root", "load"]  # the table
__all__ += ["Data", "ImageFiles", "Split", "as_data", "as_split", "random_crop", "random_flip"]

__dir__ = __all__.copy
