"""Decoding of media files: images, audio and video frames, from bytes or paths to arrays.

``images`` decodes images, ``decoders`` audio and video; the step is there, too.
"""

from midepoch.transforms.media.decoders import Decode, decoder_of

__all__ = ["Decode", "decoder_of"]
