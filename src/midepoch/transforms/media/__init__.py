"""Decoding of media files: images, audio and video frames, from bytes or paths to arrays.

The step is in ``step``; each kind of file has a module with its options and its decoders.
"""

from midepoch.transforms.media.decoders import decoder_of
from midepoch.transforms.media.step import Decode

__all__ = ["Decode", "decoder_of"]
