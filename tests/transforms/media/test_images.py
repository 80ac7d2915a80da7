"""Decoding of images: the same pixels with every decoder, in every mode, upright, and in the requested size."""

from __future__ import annotations

import io
import sys
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from midepoch.transforms.media import images
from midepoch.transforms.media.images import Images, available

DECODERS = ["simplejpeg", "torchvision", "PIL"]


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Gradients in which every pixel differs from its neighbours, and nothing is symmetric."""
    y, x = np.mgrid[:height, :width]
    bands = [(x * 255 // width), (y * 255 // height), ((x + 2 * y) * 255 // (width + 2 * height))]
    return Image.fromarray(np.stack(bands, -1).astype(np.uint8)).convert(mode)


def file_of(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def only(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make all decoders unavailable except for one, and Pillow."""
    if not available(package):
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(images, "available", lambda name: name == package)
    images.fast_decoder.cache_clear()
    monkeypatch.setattr(images, "fast_decoder", images.fast_decoder.__wrapped__)


def by_pillow(data: bytes, mode: str = "RGB") -> Any:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return np.asarray(image.convert(mode))


@pytest.mark.parametrize("package", DECODERS)
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_the_pixels_of_a_jpeg_are_those_of_pillow(
    monkeypatch: pytest.MonkeyPatch, package: str, subsampling: int, progressive: bool
) -> None:
    only(monkeypatch, package)
    data = file_of(picture(61, 47), quality=80, subsampling=subsampling, progressive=progressive)
    array = Images(layout="HWC").decode(data)
    assert array.dtype == np.uint8 and array.shape == (47, 61, 3)
    np.testing.assert_array_equal(array, by_pillow(data))
    np.testing.assert_array_equal(Images().decode(data), array.transpose(2, 0, 1))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(("width", "height"), [(501, 403), (900, 333), (257, 1025)])
def test_every_decoder_shrinks_to_the_same_pixels(
    monkeypatch: pytest.MonkeyPatch, width: int, height: int, mode: str
) -> None:
    data = file_of(picture(width, height), quality=85)
    expected = None
    for package in DECODERS:
        if available(package):
            with monkeypatch.context() as patch:
                only(patch, package)
                results = [
                    Images((50, 60), fit, mode, shrink=shrink).decode(data)
                    for fit in ("crop", "stretch")
                    for shrink in (True, False)
                ]
            expected = expected or results
            for found, wanted in zip(results, expected, strict=True):
                np.testing.assert_array_equal(found, wanted)
    assert expected is not None and not np.array_equal(expected[0], expected[1])  # it did shrink
    close = np.abs(expected[0].astype(int) - expected[1])
    assert close.mean() < 3


def test_a_jpeg_is_decoded_at_the_smallest_scale_that_is_not_smaller_than_the_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(monkeypatch, "simplejpeg")
    decoder = images.fast_decoder()
    assert decoder is not None
    for width, height, least, scale in [
        (500, 400, (224, 224), 1),
        (448, 448, (224, 224), 2),
        (447, 500, (224, 224), 1),
        (1800, 1000, (224, 224), 4),
        (999, 5000, (30, 100), 8),
    ]:
        data = memoryview(file_of(picture(width, height)))
        header = images.header_of(data)
        assert header is not None and (header.width, header.height) == (width, height)
        assert images.scale_for(width, height, least) == scale
        assert decoder(data, "RGB", header, scale).shape == (-(-height // scale), -(-width // scale), 3)
    assert images.scale_for(5000, 5000, None) == 1


@pytest.mark.parametrize("package", DECODERS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(monkeypatch: pytest.MonkeyPatch, package: str, orientation: int) -> None:
    only(monkeypatch, package)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("JPEG", "PNG", "WEBP"):
        data = file_of(picture(40, 24), kind, exif=exif)
        np.testing.assert_array_equal(Images(layout="HWC").decode(data), by_pillow(data))
        small = Images((8, 10), "stretch", layout="HWC").decode(data).astype(int)
        wanted = np.asarray(
            ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
            .convert("RGB")
            .resize((10, 8), Image.Resampling.BILINEAR)
        )
        assert np.abs(small - wanted).mean() < 4


@pytest.mark.parametrize("endian", ["<", ">"])
def test_the_orientation_is_read_in_both_byte_orders(endian: str) -> None:
    exif = Image.Exif()
    exif.endian = endian
    exif[0x010E] = "before the orientation"
    exif[0x0112] = 6
    header = images.header_of(memoryview(file_of(picture(40, 24), exif=exif.tobytes())))
    assert header == (40, 24, 3, 8, 6)


def test_an_orientation_of_four_bytes_is_read() -> None:
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x04\0\0\0\x01\0\0\0\x06\0\0\0\0"
    data = file_of(picture(40, 24), exif=exif)
    assert images.header_of(memoryview(data)) == (40, 24, 3, 8, 6)
    np.testing.assert_array_equal(Images(layout="HWC").decode(data), by_pillow(data))


def test_a_damaged_orientation_is_ignored() -> None:
    data = file_of(picture(40, 24), exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert images.header_of(memoryview(data)) == (40, 24, 3, 8, 1)


@pytest.mark.parametrize("package", DECODERS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("stored", ["RGB", "L", "CMYK"])
def test_jpegs_of_all_modes(monkeypatch: pytest.MonkeyPatch, package: str, mode: str, stored: str) -> None:
    only(monkeypatch, package)
    data = file_of(picture(40, 24, stored))
    array = Images(mode=mode, layout="HWC").decode(data)
    assert array.shape == (24, 40, 3 if mode == "RGB" else 1)
    assert np.abs(array.squeeze().astype(int) - by_pillow(data, mode)).max() <= 1  # grey is Y of the file


@pytest.mark.parametrize("package", DECODERS)
def test_a_grey_jpeg_has_the_brightness_that_the_file_stores(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Also in saturated colors, where grey of clipped RGB values differs."""
    only(monkeypatch, package)
    pixels = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (48, 64, 3))
    data = file_of(Image.fromarray(pixels))
    with Image.open(io.BytesIO(data)) as image:
        image.draft("L", image.size)
        np.testing.assert_array_equal(Images(mode="L").decode(data)[0], np.asarray(image))
    assert np.abs(np.asarray(image).astype(int) - by_pillow(data, "L")).max() > 10


@pytest.mark.parametrize("stored", ["1", "L", "LA", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_transparency_is_dropped_and_palettes_are_resolved(stored: str, kind: str, mode: str) -> None:
    image = picture(40, 24, "RGB" if stored in ("RGBA", "P", "LA") else stored)
    if stored == "P":
        image = image.quantize(16)
    if stored in ("RGBA", "LA"):
        image = image.convert(stored)
        image.putalpha(picture(40, 24, "L"))
    if kind == "WEBP":
        image = image.convert("RGBA" if stored in ("RGBA", "LA") else "RGB")
    data = file_of(image, kind, lossless=True) if kind == "WEBP" else file_of(image, kind)
    array = Images(mode=mode, layout="HWC").decode(data)
    opaque = Image.open(io.BytesIO(data)).convert("RGBA").convert("RGB").convert(mode)
    assert np.abs(array.squeeze().astype(int) - np.asarray(opaque)).max() <= 1


def test_a_palette_with_transparent_colors_is_no_warning() -> None:
    image = picture(40, 24).quantize(16)
    data = file_of(image, "PNG", transparency=bytes(range(16)))
    np.testing.assert_array_equal(Images(layout="HWC").decode(data), np.asarray(image.convert("RGB")))


def test_images_of_16_bits_keep_the_upper_8() -> None:
    deep = (np.arange(24 * 40).reshape(24, 40) * 68).astype(np.uint16)
    data = file_of(Image.fromarray(deep), "PNG")
    np.testing.assert_array_equal(Images(mode="L", layout="HWC").decode(data)[:, :, 0], deep >> 8)
    np.testing.assert_array_equal(Images(layout="HWC").decode(data)[:, :, 2], deep >> 8)


@pytest.mark.parametrize(
    ("fit", "size", "shape"),
    [
        ("crop", (20, 30), (20, 30)),
        ("stretch", (20, 30), (20, 30)),
        ("shorter", (20, 20), (20, 33)),
        ("shorter", (48, 48), (48, 80)),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_size_of_the_result(fit: str, size: tuple[int, int], shape: tuple[int, int], kind: str) -> None:
    options = Images(size, fit, layout="HWC")
    array = options.decode(file_of(picture(40, 24), kind))
    assert array.shape == (*shape, 3)
    assert options.shape == (None if fit == "shorter" else array.shape)
    assert Images(size, fit).shape == (None if fit == "shorter" else (3, *size))


def test_a_crop_shows_the_center_without_distortion() -> None:
    image = Image.new("RGB", (100, 60))
    image.paste((255, 0, 0), (0, 0, 20, 60))  # cut off
    image.paste((0, 255, 0), (80, 0, 100, 60))  # cut off
    image.paste((0, 0, 255), (45, 25, 55, 35))  # the center
    array = Images((60, 60), layout="HWC").decode(file_of(image, "PNG"))
    assert not array[:, :, :2].any()
    assert array[25:35, 25:35, 2].min() == 255 and array[:, :, 2].sum() == 255 * 100


@given(*[st.integers(1, 3000)] * 4, st.sampled_from(["crop", "stretch", "shorter"]))
def test_the_box_of_a_result_is_inside_the_image(width: int, height: int, high: int, wide: int, fit: str) -> None:
    size = (high, high) if fit == "shorter" else (high, wide)
    wanted, (left, top, right, bottom) = Images(size, fit)._target(width, height, size)
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    assert min(wanted) == high if fit == "shorter" else wanted == (wide, high)
    if fit == "crop":
        assert (right - left) / (bottom - top) == pytest.approx(wide / high)
        assert left + right == pytest.approx(width) and top + bottom == pytest.approx(height)
        assert right - left == width or bottom - top == height


@pytest.mark.parametrize("package", DECODERS)
def test_a_damaged_file_is_an_error_with_every_decoder(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    only(monkeypatch, package)
    for kind in ("JPEG", "PNG", "WEBP"):
        data = file_of(picture(200, 100), kind)
        for broken in (data[: len(data) // 2], data[:10], b"", b"no image"):
            with pytest.raises((OSError, ValueError, SyntaxError)):
                Images().decode(broken)
    data = file_of(picture(200, 100))
    np.testing.assert_array_equal(Images().decode(data + b"garbage"), Images().decode(data))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3), st.integers(0, 10**6))
def test_random_damage_has_the_same_result_with_every_decoder(changes: list[tuple[int, int]], cut: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    data = bytearray(file_of(picture(90, 70), quality=60, exif=exif))
    for at, value in changes:
        data[at % len(data)] = value
    if cut % 3 == 0:
        del data[cut % len(data) :]
    results = []
    for package in DECODERS:
        if available(package):
            with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Pillow, about damaged EXIF data and huge images
                only(patch, package)
                try:
                    results.append(Images((32, 32)).decode(bytes(data)).tobytes())
                except Exception:
                    results.append(b"damaged")
    assert len(set(results)) == 1


@pytest.mark.parametrize("package", DECODERS)
def test_the_limit_of_pillow_holds_for_every_decoder(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    only(monkeypatch, package)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(Image.DecompressionBombError):
        Images((8, 8)).decode(file_of(picture(80, 60)))


@pytest.mark.parametrize(("package", "kind"), [*[(each, "JPEG") for each in DECODERS], ("PIL", "PNG"), ("PIL", "WEBP")])
@pytest.mark.parametrize("size", [None, (64, 64)])
def test_decoding_releases_the_gil(monkeypatch: pytest.MonkeyPatch, package: str, kind: str, size: Any) -> None:
    """No thread is asked for the GIL: another one runs during a call only if the call releases it."""
    only(monkeypatch, package)
    data, decoder = file_of(picture(1500, 1200), kind), Images(size, shrink=False)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        assert any(_other_thread_runs(lambda: decoder.decode(data)) for _ in range(20))
        assert not any(_other_thread_runs(lambda: sum(range(300_000))) for _ in range(3))
    finally:
        sys.setswitchinterval(before)


def _other_thread_runs(call: Any) -> bool:
    steps: list[str] = []

    def work() -> None:
        steps.append("begun")
        call()
        steps.append("ended")

    thread = threading.Thread(target=work)
    thread.start()
    while not steps:
        time.sleep(0)
    during = steps == ["begun"]
    thread.join()
    return during


def test_pillow_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "available", lambda name: False)
    with pytest.raises(Exception, match=r"needs Pillow.*midepoch\[media\]"):
        images.check_packages("image")
