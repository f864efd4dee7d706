"""Examples with a trained model's outputs, for the report, and pictures of those that are images."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

LARGEST_SIDE = 192  # Pixels of a picture in the report.


@dataclass(frozen=True)
class Reviewed:
    """The first examples of a split, in its order, with the model's outputs for them.

    inputs, targets and outputs are arrays, or nested structures of them, whose first axis is the examples.
    """

    inputs: Any
    targets: Any
    outputs: Any
    number: int
    split: str
    total: int

    @property
    def which(self) -> str:
        """The examples in words.

        >>> Reviewed(None, None, None, 360, "test", 360).which, Reviewed(None, None, None, 2000, "test", 10_000).which
        ('all 360 test examples', 'the first 2,000 of 10,000 test examples')
        """
        if self.number == self.total:
            return f"all {self.total:,} {self.split} examples"
        return f"the first {self.number:,} of {self.total:,} {self.split} examples"

    @property
    def has_images(self) -> bool:
        """True if the inputs are images that can be shown."""
        return isinstance(self.inputs, np.ndarray) and self.inputs.ndim == 4 and self.inputs.shape[-1] in (1, 3)


def as_bytes(image: np.ndarray) -> np.ndarray:
    """An image [height, width, 1 or 3] as uint8 [height, width, 3].

    Its values, which the data set may have normalized, are stretched to 0 ... 255.
    """
    image = image.astype(np.float64)
    low, high = float(np.nanmin(image)), float(np.nanmax(image))
    stretched = np.nan_to_num((image - low) / max(high - low, 1e-9)) * 255
    return np.broadcast_to(np.rint(stretched).astype(np.uint8), (*image.shape[:2], 3))


def png(pixels: np.ndarray, panels: int = 1) -> str:
    """uint8 [height, width, 3] as PNG in base64. panels: images side by side, each at most LARGEST_SIDE large."""
    image, file = Image.fromarray(np.ascontiguousarray(pixels)), io.BytesIO()
    image.thumbnail((LARGEST_SIDE * panels, LARGEST_SIDE))
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
