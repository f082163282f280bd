"""Arrays as PNG images."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy

_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
"""For PNG, by the number of channels: grey, RGB, RGB with transparency."""


def png(pixels: Any) -> bytes:
    """Return an array of bytes as a PNG image.

    Args:
        pixels: The pixels of type uint8 and shape (height, width) or (height, width, 1, 3 or 4).

    Raises:
        ValueError: The array has another type or shape.
    """
    array = numpy.ascontiguousarray(pixels)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.dtype != numpy.uint8 or array.ndim != 3 or array.shape[2] not in _COLOUR_TYPES:
        raise ValueError(f"an array of type {array.dtype} and shape {array.shape} is not an image")
    height, width, channels = array.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    lines = numpy.zeros((height, 1 + width * channels), numpy.uint8)  # each with filter 0
    lines[:, 1:] = array.reshape(height, -1)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
