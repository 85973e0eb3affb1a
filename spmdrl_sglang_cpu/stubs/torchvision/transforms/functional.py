"""The one name that SGLang uses while it imports."""

from enum import Enum


class InterpolationMode(Enum):
    """How torchvision resizes; SGLang takes some of these for default arguments."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"
