"""ImageNet (ILSVRC 2012): folders of photographs, decoded batch by batch."""

from __future__ import annotations

from pathlib import Path

from lipkit.data.folder import load_images
from lipkit.data.split import Data

INPUT_SHAPE = (3, 224, 224)
SOURCE = (
    "put the images into imagenet/train/WNID/*.JPEG and imagenet/val/WNID/*.JPEG under the data root ($LIPKIT_DATA or "
    "./data), the validation images sorted into the folders of their classes; they are at https://image-net.org/"
)


def load_imagenet(root: Path) -> Data:
    """Load ImageNet: RGB of 224 x 224, the classes named by their WordNet numbers in sorted order.

    Args:
        root: the data root; the folders are `root/imagenet/train/WNID` and `root/imagenet/val/WNID`.

    Raises:
        DataError: see `load_images`.

    References:
        Russakovsky et al., "ImageNet large scale visual recognition challenge", IJCV 115 (2015).
    """
    return load_images(root / "imagenet", INPUT_SHAPE[1], name="imagenet", layout=SOURCE)
