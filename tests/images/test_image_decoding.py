"""Image and mask files from OpenCV, PIL, tifffile and numpy: what is read, what is refused, and the reason."""

import builtins
import gzip
import io
import os
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from helpers.hostile import Call
from helpers.image_bytes import exif, grey_png, npy_bytes, pil_bytes, tiff_bytes
from helpers.mutations import image_files, mutated
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_decoding import EncodedImage, decode_image, describe_file, encode_image, read_image
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.images.mask_decoding import COLOUR, decode_mask, decode_mask_or_alpha

IDS = np.array([[0, 1, 2], [3, 2, 1]], np.uint8)
PALETTE = [0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255]  # black, red, green, blue


def picture(height=40, width=60):
    """A smooth colour image, which JPEG keeps nearly as it is."""
    y, x = np.mgrid[0:height, 0:width]
    return np.dstack([x * 4, y * 5, np.full_like(x, 90)]).astype(np.uint8)


def noise(height=80, width=80, high=256):
    return np.random.default_rng(0).integers(0, high, (height, width), np.uint8)


def palette_image(ids):
    image = Image.fromarray(ids)
    image.putpalette(PALETTE)
    return image


def tiff(array, **options):
    """Grey, of one or many channels, unless the options say otherwise."""
    return tiff_bytes(array, **({"photometric": "minisblack"} | options))


def values(dtype, *shape):
    return np.random.default_rng(1).integers(0, 200, shape).astype(dtype)


def same(read, expected):
    return read.dtype == expected.dtype and read.shape == expected.shape and np.array_equal(read, expected)


def reason(read, source):
    """The message of the ReadError that reading a path or decoding bytes raises."""
    with pytest.raises(ReadError) as raised:
        read(source)
    return str(raised.value)


@pytest.mark.parametrize(("kind", "orientation"), [("JPEG", 6), ("PNG", 8), ("WEBP", 3)])
def test_an_image_is_rotated_by_its_exif_orientation(kind, orientation):
    data = pil_bytes(kind, picture(), exif=exif(orientation), **({"lossless": True} if kind == "WEBP" else {}))
    with Image.open(io.BytesIO(data)) as image:
        expected = np.array(ImageOps.exif_transpose(image)).astype(int)
    read = decode_image(data)
    assert read.shape == ((60, 40, 3) if orientation > 4 else (40, 60, 3))
    assert np.abs(read - expected).mean() < 2
    assert EncodedImage(data).is_turned
    if kind == "JPEG":  # behind a long comment
        late = data[:2] + 2 * (b"\xff\xe5\xff\xff" + bytes(65533)) + data[2:]
        assert same(decode_image(late), read.astype(np.uint8))
        assert EncodedImage(late).is_turned


def test_grey_with_alpha_is_one_channel():
    grey, alpha = noise(), noise() // 2
    for kind in ("PNG", "TIFF"):
        data = pil_bytes(kind, Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha)]))
        assert same(decode_image(data), grey[:, :, None])
        assert EncodedImage(data).channels_with_alpha == 2
        assert np.array_equal(decode_mask(data), grey)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.float16, np.float64])
@pytest.mark.parametrize("channels", [1, 3, 64])
def test_an_array_of_any_depth_keeps_its_values_and_its_channels_may_be_first_or_last(dtype, channels):
    image = values(dtype, 80, 90, channels)
    others = (
        np.moveaxis(image, 2, 0),
        np.asfortranarray(image),
        image[None],
        image.astype(image.dtype.newbyteorder(">")),
    )
    for array in (image, *others, *([image[:, :, 0]] if channels == 1 else [])):
        assert same(decode_image(npy_bytes(array)), image)


NEED_CHANNELS = "need height, width and up to 64 channels, first or last"
NEED_VALUES = "need whole numbers from 0 to 65535"
ONE_VALUE = "a mask has one value, or a colour, for each pixel"


@pytest.mark.parametrize(
    ("decode", "array", "why"),
    [
        *((decode_image, np.zeros(shape), f"an array of shape {shape}; {NEED_CHANNELS}") for shape in ((5,), (3, 40, 3), (2, 3, 40, 50))),
        *((decode_mask, np.zeros(shape, np.uint8), f"an array of shape {shape}; {ONE_VALUE}") for shape in ((20, 30, 4), (20,))),
        (decode_mask, np.array([[0, 1], [2, np.nan]]), f"1 values are NaN; {NEED_VALUES}"),
        (decode_mask, np.array([[0, 1], [2, 70000.0]]), f"float64 values from 0.0 to 70000.0; {NEED_VALUES}"),
        (decode_mask, np.array([[0, 1], [2, 0.5]]), f"float64 values from 0.0 to 2.0; {NEED_VALUES}"),
    ],
)  # fmt: skip
def test_an_array_of_an_ambiguous_shape_or_of_values_that_are_no_mask_is_refused(decode, array, why):
    assert reason(decode, npy_bytes(array)) == why


def test_an_array_of_python_objects_is_refused_and_no_code_is_run():
    array = np.empty((2, 2), object)
    array[:] = Call(exec, "import builtins; builtins.code_was_run = True")
    data = npy_bytes(array, allow_pickle=True)
    for decode in (decode_image, decode_mask):
        assert reason(decode, data) == "cannot be decoded (it holds Python objects)"
    assert not hasattr(builtins, "code_was_run")
    np.load(io.BytesIO(data), allow_pickle=True)  # the file does run code when it is unpickled
    assert builtins.code_was_run
    del builtins.code_was_run


@pytest.mark.filterwarnings("ignore")  # PIL's, which a scan ignores too
def test_a_damaged_file_of_any_format_raises_nothing_but_a_read_error():
    whole, rng, refusals = [*image_files().values()], np.random.default_rng(0), []
    for data in whole * 4:
        broken = mutated(data, rng, whole)
        assert EncodedImage(broken).channels_with_alpha in range(65)
        assert EncodedImage(broken).is_turned in (False, True)
        for decode in (decode_image, decode_mask):
            try:
                decode(broken)
            except ReadError as error:
                refusals.append(str(error))
    assert len(refusals) > 25
    assert all(refusals)


DISC = np.kron(np.array([[0, 255, 255, 0], [0, 255, 0, 0]], np.uint8), np.ones((6, 5), np.uint8))  # 12 high, 20 wide


def in_alpha(kind, colour=(255, 255, 255), alpha=DISC, **options):
    """A picture of one colour with this alpha channel."""
    return pil_bytes(kind, np.dstack([np.full((*alpha.shape, len(colour)), colour, np.uint8), alpha]), **options)


def test_of_a_picture_in_one_colour_with_holes_the_alpha_channel_is_the_mask():
    webp = in_alpha("WEBP", lossless=True, exact=True)
    opaque = in_alpha("PNG", alpha=np.full_like(DISC, 255))
    coloured = pil_bytes("PNG", np.dstack([DISC, DISC, DISC, 255 - DISC]))
    in_holes = [(data, DISC, True) for data in (in_alpha("PNG"), in_alpha("PNG", (200, 30, 0)), webp, in_alpha("TIFF"))]
    for data, expected, is_alpha in (*in_holes, (opaque, np.full_like(DISC, 255), False), (coloured, DISC, False)):
        mask, was_alpha = decode_mask_or_alpha(EncodedImage(data))
        assert was_alpha == is_alpha
        assert np.array_equal(mask, expected)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_masks_of_few_bits_keep_their_values(bits):
    """OpenCV scales them to 255. One bit is {0, 255}, as in every other reader."""
    ids = np.arange(2**bits, dtype=np.uint8).reshape(1, -1).repeat(8, 0)
    packed = np.packbits(np.unpackbits(ids[:, :, None], axis=2)[:, :, 8 - bits :].reshape(8, -1), axis=1)
    rows = b"".join(b"\0" + row.tobytes() for row in packed)
    expected = ids * (255 if bits == 1 else 1)
    assert decode_mask(grey_png(ids.shape[1], 8, bits, zlib.compress(rows))).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float64])
def test_a_mask_of_whole_numbers_in_any_depth_is_read(dtype):
    ids = IDS.astype(dtype)
    for data in (npy_bytes(ids), tiff(ids), npy_bytes(ids[None]), npy_bytes(ids[:, :, None])):
        assert same(decode_mask(data), IDS)


def test_a_colour_mask_is_read_from_every_lossless_format():
    colours = np.array([[[255, 0, 0], [0, 128, 7]], [[0, 0, 0], [255, 255, 255]]], np.uint8)
    expected = [[COLOUR + 0xFF0000, COLOUR + 0x008007], [0, 255]]
    encoded = [encode_image(colours, extension) for extension in (".png", ".bmp", ".tif")]
    for data in (*encoded, npy_bytes(colours), tiff(colours, photometric="rgb")):
        assert decode_mask(data).tolist() == expected
    palette = Image.fromarray(colours).convert("P", palette=Image.Palette.ADAPTIVE)
    assert decode_mask(pil_bytes("GIF", palette)).tolist() == expected


@pytest.mark.parametrize(
    ("height", "width", "min_side", "factor", "grey"),
    [(400, 600, 50, 8, False), (404, 602, 100, 2, True), (403, 601, 100, 1, False)],
)
def test_a_large_jpeg_is_decoded_at_the_smallest_fraction_that_is_large_enough(
    tmp_path, height, width, min_side, factor, grey
):
    coarse = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    Image.fromarray(smooth[:, :, 0] if grey else smooth).save(tmp_path / "a.jpg", quality=95)
    reduced = read_image(tmp_path / "a.jpg", min_side)
    assert reduced.shape == (height // factor, width // factor, 1 if grey else 3)
    full = read_image(tmp_path / "a.jpg")
    assert full.shape[:2] == (height, width)
    small = cv2.resize(full, (width // factor, height // factor), interpolation=cv2.INTER_AREA).reshape(reduced.shape)
    assert np.abs(small.astype(int) - reduced).mean() < 2
    assert RGB_8BIT.decode((tmp_path / "a.jpg").read_bytes(), min_side).size == (height, width)


# What the header of a file says before it is decoded, and what a file is that is no image

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
GREY = PIXELS[:, :, 0]
FOUR = np.dstack([PIXELS, GREY])


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_indices_into_colours_are_a_palette_whose_index_is_the_mask_and_greys_are_not(kind):
    ids = GREY // 64
    data = pil_bytes(kind, palette_image(ids))
    assert same(decode_mask(data), ids)
    assert decode_image(data)[0, 0].tolist() == np.array(PALETTE).reshape(4, 3)[ids[0, 0]].tolist()
    assert EncodedImage(data).palette[:4] == [(0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)]
    assert EncodedImage(data[:30]).palette == []
    for other in (GREY, PIXELS):  # a BMP of greys has a table of greys in order
        assert EncodedImage(pil_bytes(kind, other)).palette == []


def test_in_a_palette_of_black_and_white_black_is_0_whatever_their_order():
    ids = GREY // 128
    for colours, expected in (([255] * 3 + [0] * 3, 1 - ids), ([0] * 3 + [255] * 3, ids)):
        image = Image.fromarray(ids)
        image.putpalette(colours)
        for kind in ("PNG", "TIFF"):
            assert same(decode_mask(pil_bytes(kind, image)), expected)
    image = Image.fromarray(GREY // 64)  # three ids and more in the colours of two
    image.putpalette([255] * 3 + [0] * 9)
    assert same(decode_mask(pil_bytes("PNG", image)), GREY // 64)


def test_compression_that_changes_values_is_told():
    lossy = [("JPEG", GREY, {}), ("WEBP", PIXELS, {}), ("WEBP", FOUR, {}), ("TIFF", PIXELS, {"compression": "jpeg"})]
    exact = [("PNG", GREY, {}), ("WEBP", FOUR, {"lossless": True}), ("TIFF", PIXELS, {"compression": "tiff_lzw"})]
    assert all(EncodedImage(pil_bytes(kind, pixels, **options)).is_lossy for kind, pixels, options in lossy)
    assert not any(EncodedImage(pil_bytes(kind, pixels, **options)).is_lossy for kind, pixels, options in exact)
    assert not EncodedImage(npy_bytes(GREY)).is_lossy


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_without_its_end_is_cut_off(kind):
    data = pil_bytes(kind, PIXELS)
    assert not EncodedImage(data).is_cut_off
    assert not EncodedImage(data + bytes(100)).is_cut_off  # a phone's video may follow
    for length in (len(data) - 20, len(data) // 2, 10):
        assert EncodedImage(data[:length]).is_cut_off
        for decode in (decode_image, decode_mask):
            with pytest.raises(ReadError, match="the file is cut off"):
                decode(data[:length])
    assert not EncodedImage(pil_bytes("BMP", PIXELS)[:100]).is_cut_off  # its decoder notices it


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git lfs pull"),
        (b"PK\x03\x04\x14\0", "an archive; unpack it"),
        (gzip.compress(b"a"), "an archive; unpack it"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC format; convert it"),
        (b"\0\0\0\x20ftypavif\0\0\0\0", "a picture of a form that is not read; convert it"),
        (bytes(128) + b"DICM\x02\0\0\0UL", "a DICOM file; save its slices"),
        (b"<!DOCTYPE html><html><head><title>404</title>", "a web page; the download failed"),
        (b'{"shapes": []}', "a text, not an image"),
    ],
)
def test_content_is_recognised_and_says_so_where_an_image_is_expected(data, text):
    for decode in (decode_image, decode_mask):
        with pytest.raises(ReadError, match=text):
            decode(data)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_the_extension_tells_and_without_one_the_content(tmp_path):
    names = {
        "IMG_0001.HEIC": "HEIC",
        "brain.nii.gz": "NIfTI",
        "data.zip": "archive",
        "data.tar.gz": "unpack it",
        "a.b.mp4": "video",
        "a.JFIF": "convert it to PNG",
        "im0001.ah.ppm": "convert it to PNG",
        "case1.npz": "save each image",
    }
    for name, text in {**names, "a.png": None, "notes.txt": None}.items():
        (tmp_path / name).write_bytes(b"anything")
        found = describe_file(tmp_path / name)
        assert found is None if text is None else text in found
    (tmp_path / "IM000001").write_bytes(bytes(128) + b"DICM")
    assert "DICOM" in describe_file(tmp_path / "IM000001")
    os.mkfifo(tmp_path / "pipe")
    assert describe_file(tmp_path / "pipe") is None
    assert describe_file(tmp_path / "missing") is None
