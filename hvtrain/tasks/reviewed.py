"""Examples with a trained model's outputs, for the figures of the report, and images as PNG."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

MAX_SIDE_PIXELS = 192
"""The longest side of an image in the report."""


@dataclass(frozen=True)
class ReviewedExamples:
    """The first examples of a split, in its order, with the model's outputs for them.

    Inputs, targets and outputs are arrays or nested structures of arrays, examples first.
    """

    inputs: Any
    targets: Any
    outputs: Any
    number: int
    split: str
    total: int
    """Examples in the whole split."""

    @property
    def description(self) -> str:
        """The examples in words.

        >>> ReviewedExamples(None, None, None, 360, "test", 360).description
        'all 360 test examples'
        >>> ReviewedExamples(None, None, None, 2000, "test", 10_000).description
        'the first 2,000 of 10,000 test examples'
        """
        if self.number == self.total:
            return f"all {self.total:,} {self.split} examples"
        return f"the first {self.number:,} of {self.total:,} {self.split} examples"

    @property
    def has_images(self) -> bool:
        """True if the inputs are grey or RGB images."""
        if not isinstance(self.inputs, np.ndarray):
            return False
        return self.inputs.ndim == 4 and self.inputs.shape[-1] in (1, 3)


def as_bytes(image: np.ndarray) -> np.ndarray:
    """Turns an image [height, width, 1 or 3] into uint8 [height, width, 3].

    The data set may have normalized its values, so they are stretched to 0 ... 255.
    """
    image = image.astype(np.float64)
    low = float(np.nanmin(image))
    high = float(np.nanmax(image))
    # An image of one color has no range to divide by, and NaN becomes black.
    stretched = np.nan_to_num((image - low) / max(high - low, 1e-9)) * 255
    return np.broadcast_to(np.rint(stretched).astype(np.uint8), (*image.shape[:2], 3))


def png(*panels: np.ndarray) -> str:
    """Encodes images uint8 [height, width, 3] side by side, as one PNG in base64.

    Each fits into the size of the last one, and is shrunk to MAX_SIDE_PIXELS at most.
    """
    height, width, _ = panels[-1].shape
    # The gap is transparent, since pages may be light or dark.
    distance = width + max(1, width // 24)
    image = Image.new("RGBA", (len(panels) * distance - distance + width, height))
    for index, pixels in enumerate(panels):
        panel = ImageOps.contain(Image.fromarray(np.ascontiguousarray(pixels)), (width, height))
        left = index * distance + (width - panel.width) // 2
        image.paste(panel, (left, (height - panel.height) // 2))

    # A thumbnail is never larger than the image: 8x8 pixels stay 8x8. In place, with its sides in proportion.
    image.thumbnail((MAX_SIDE_PIXELS * len(panels), MAX_SIDE_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
