"""The same name, where torchvision has it too."""

from torchvision.transforms.functional import InterpolationMode as InterpolationMode
