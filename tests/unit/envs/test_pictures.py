"""Arrays as PNG images, in the environment gymnasium."""

from __future__ import annotations

import struct
import zlib

import numpy
import pytest

from tests.unit.envs.source_modules import source_modules


def test_arrays_of_bytes_become_images_and_others_are_refused() -> None:
    with source_modules("gymnasium", "pictures") as (pictures,):
        for shape, colour_type in (((2, 3), 0), ((2, 3, 1), 0), ((2, 3, 3), 2), ((2, 3, 4), 6)):
            pixels = numpy.arange(numpy.prod(shape), dtype=numpy.uint8).reshape(shape)
            image = pictures.png(pixels)
            assert image.startswith(b"\x89PNG\r\n\x1a\n")
            assert struct.unpack(">IIBB", image[16:26]) == (3, 2, 8, colour_type)
            (length,) = struct.unpack(">I", image[33:37])
            lines = zlib.decompress(image[41 : 41 + length])
            flat = pixels.reshape(2, -1)
            assert lines == b"".join(b"\0" + row.tobytes() for row in flat)
        for wrong in (numpy.zeros((2, 3)), numpy.zeros((2, 3, 2), numpy.uint8)):
            with pytest.raises(ValueError, match="is not an image"):
                pictures.png(wrong)
