"""TIFF and BigTIFF files read block by block: the tiles or strips of a part are decoded, and no others.

A block of grey or colour is decoded as a TIFF file of its own by `decode_image`, so that its pixels come out as those of small
files do, whatever its compression. Of all others the bytes are decompressed, by OpenCV too where Python has no decoder, and put in
order here.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from unet_trainer.images import image_headers as headers
from unet_trainer.images.file_bytes import ReadError, open_file
from unet_trainer.images.image_files import BOMB_PIXELS, BOMB_RATIO, MAX_CHANNELS, NO_MEMORY, Pixels, check_tiff, decode_image
from unet_trainer.images.tiling import Size
from unet_trainer.system.console import first_line
from unet_trainer.system.resources import count_cores

if TYPE_CHECKING:
    import tifffile

SHORT, LONG, UNDEFINED = 3, 4, 7  # types of a tag's values
FORMATS = {SHORT: "H", LONG: "I", UNDEFINED: "B"}
WIDTH, LENGTH, COMPRESSION, OFFSETS, ROWS_PER_STRIP, BYTE_COUNTS, SAMPLE_FORMAT = 256, 257, 259, 273, 278, 279, 339
PREDICTOR, JPEG_TABLES = 317, 347
UNCOMPRESSED, LZW, PACK_BITS, DEFLATE = 1, 5, 32773, (8, 32946)  # values of COMPRESSION
NEED_IMAGECODECS = {50000: "ZSTD", 34925: "LZMA"}
HORIZONTAL, FLOATING_POINT = 2, 3  # values of PREDICTOR
MIN_IS_BLACK, INTERLEAVED = 1, 1
# Tags that say how the bytes of a block become pixels: fill order, fax options, predictor, colour map, chroma.
HOW_TO_DECODE = (COMPRESSION, headers.TIFF_PHOTOMETRIC, 266, 292, 293, PREDICTOR, 320, 530, 531)
MAX_STRIPS = 2**20  # of such a page: a broken header may say billions of rows
STRIP_BYTES = 2**20  # of the strips that an uncompressed page is read in, however it is stored

Tags = Mapping[int, tuple[int, Sequence[int]]]  # tag → type and values


class Block(NamedTuple):
    offset: int
    num_bytes: int


class Page(NamedTuple):
    """The blocks of one page, or of one plane of it."""

    blocks: Sequence[Block]  # row by row
    block_size: Size
    tags: Tags
    is_tiled: bool


class TiffBlocks:
    """An image of one TIFF file; its channels are samples, planes or pages. May be read from several threads; to be closed.

    `channels` of the model: an alpha channel beyond them is dropped. Raises ReadError.
    """

    def __init__(self, path: Path, channels: int | None = None) -> None:
        import tifffile

        self.file: BinaryIO = open_file(path)
        try:
            tags = headers.single_page_tags(check_tiff(self.file))
            self.file.seek(0)
            with tifffile.TiffFile(self.file) as found:
                self.pages, self.size, num_samples, has_alpha = _find_pages(found)
            _check_geometry(self.pages, self.size)
            # As decode_image reads it: the orientation that it applies, and whether it drops alpha.
            self.orientation = tags.get(headers.ORIENTATION, (1,))[0] if headers.is_plain_tiff(tags) else 1
            has_plain_alpha = headers.tiff_has_alpha(tags)
            self.num_file_bytes = self.file.seek(0, 2)
        except ReadError:
            self.file.close()
            raise
        except Exception as error:  # a broken file may raise anything here
            self.file.close()
            raise ReadError(f"cannot be decoded ({first_line(error)})") from None
        self.drops_alpha = has_plain_alpha or (has_alpha and channels == num_samples - 1)
        self.last_row: dict[int, Pixels] = {}  # the last row of blocks of the last part: the part below it may begin there
        self.lock, self.file_lock = threading.Lock(), threading.Lock()
        self.threads = ThreadPoolExecutor(count_cores(), "TIFF blocks")

    def __enter__(self) -> TiffBlocks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.threads.shutdown(cancel_futures=True)
        self.file.close()

    def read(self, rows: slice, columns: slice) -> Pixels:
        """H,W,C of a part."""
        height = self.pages[0].block_size[0]
        wanted = range(rows.start // height, -(-rows.stop // height))
        with self.lock:
            missing = [index for index in wanted if index not in self.last_row]
            found = {**self.last_row, **dict(zip(missing, self._decode_rows(missing), strict=True))}
            self.last_row = {wanted[-1]: found[wanted[-1]]}
        parts = [found[index][max(0, rows.start - index * height) : rows.stop - index * height, columns] for index in wanted]
        return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)

    def _decode_rows(self, rows: Sequence[int]) -> list[Pixels]:
        """Of each row of blocks, all beside each other, cut to the image."""
        width = self.size[1]
        num_columns = -(-width // self.pages[0].block_size[1])
        places = [(page, row * num_columns + column) for row in rows for page in self.pages for column in range(num_columns)]
        blocks = list(self.threads.map(lambda place: self._decode(*place), places))
        strips = [np.hstack(blocks[start : start + num_columns])[:, :width] for start in range(0, len(blocks), num_columns)]
        decoded = [np.dstack(strips[start : start + len(self.pages)]) for start in range(0, len(strips), len(self.pages))]
        return [pixels[:, :, :-1] if self.drops_alpha else pixels for pixels in decoded]

    def _decode(self, page: Page, index: int) -> Pixels:
        """H,W,C of a block. The last strip may be lower than the others; a tile never is."""
        height, width = page.block_size
        top = index // -(-self.size[1] // width) * height
        num_rows = height if page.is_tiled else min(height, self.size[0] - top)
        offset, num_bytes = page.blocks[index]
        if min(offset, num_bytes) < 0:  # the tag may have a type with a sign
            raise ReadError(f"a block of {num_bytes} bytes at {offset}")
        if num_bytes == 0:  # of a sparse file: nothing is stored for empty blocks
            try:
                return np.zeros((num_rows, width, _num_channels(page.tags)), _dtype(page.tags))[: self.size[0] - top]
            except (MemoryError, ValueError):
                raise ReadError(NO_MEMORY) from None
        if offset + num_bytes > self.num_file_bytes:
            raise ReadError("the file is cut off")
        if num_rows * width > max(BOMB_PIXELS, num_bytes * BOMB_RATIO):
            raise ReadError(f"a block of {width}×{num_rows} pixels in {num_bytes} bytes: a decompression bomb")
        data = self._stored(offset, num_bytes)
        try:
            return _decode_block(data, (num_rows, width), page.tags)[: self.size[0] - top]
        except ReadError:
            raise
        except MemoryError:
            raise ReadError(NO_MEMORY) from None
        except Exception as error:  # a broken file may raise anything here
            raise ReadError(f"cannot be decoded ({first_line(error)})") from None

    def _stored(self, offset: int, num_bytes: int) -> bytes:
        with self.file_lock:
            try:
                self.file.seek(offset)
                return self.file.read(num_bytes)
            except OSError as error:
                raise ReadError(error.strerror or str(error)) from None


def _decode_block(data: bytes, size: Size, tags: Tags) -> Pixels:
    """H,W,C of one tile or strip."""
    is_plain = headers.is_plain_tiff({tag: tuple(values) for tag, (_, values) in tags.items() if tag})
    if is_plain and _value(tags, COMPRESSION, 1) not in NEED_IMAGECODECS:
        pixels = decode_image(one_block_tiff(data, size, tags))
        if pixels.shape[:2] != size:
            raise ReadError(f"a block has {pixels.shape[1]}×{pixels.shape[0]} pixels; need {size[1]}×{size[0]}")
        return pixels
    dtype, num_samples = _dtype(tags), tags[headers.TIFF_SAMPLES][1][0]
    row_bytes = size[1] * num_samples * dtype.itemsize
    rows = np.frombuffer(_decompress(data, (size[0], row_bytes), _value(tags, COMPRESSION, 1)), np.uint8)
    if rows.size < size[0] * row_bytes:
        raise ReadError("a block holds fewer bytes than its pixels need")
    values = _undo_predictor(rows[: size[0] * row_bytes].reshape(size[0], row_bytes), dtype, num_samples, tags)
    return values.reshape(*size, num_samples)


def _decompress(data: bytes, size: Size, compression: int) -> bytes:
    """The bytes of a block, in so many rows."""
    if compression == UNCOMPRESSED:
        return data
    if compression in DEFLATE:
        try:
            return zlib.decompress(data)
        except zlib.error as error:
            raise ReadError(f"cannot be decoded ({error})") from None
    if compression in (LZW, PACK_BITS):  # as if they were the pixels of a grey image, which OpenCV decompresses
        tags = {COMPRESSION: (SHORT, [compression]), headers.TIFF_BITS: (SHORT, [8]), headers.TIFF_SAMPLES: (SHORT, [1])}
        return decode_image(one_block_tiff(data, size, {**tags, headers.TIFF_PHOTOMETRIC: (SHORT, [MIN_IS_BLACK])})).tobytes()
    return _decompress_with_tifffile(data, compression)


def _decompress_with_tifffile(data: bytes, compression: int) -> bytes:
    import tifffile

    if compression not in NEED_IMAGECODECS:
        raise ReadError(f"TIFF compression {compression} of such channels is not read; save it with LZW or deflate compression")
    try:
        return bytes(tifffile.TIFF.DECOMPRESSORS[compression](data))
    except (ImportError, KeyError):
        name = NEED_IMAGECODECS[compression]
        raise ReadError(
            f"{name} compression needs another package: run pip install imagecodecs, or save it with LZW or deflate compression"
        ) from None
    except Exception as error:  # the decoder's own
        raise ReadError(f"cannot be decoded ({error})") from None


def _undo_predictor(rows: Pixels, dtype: np.dtype[Any], num_samples: int, tags: Tags) -> Pixels:
    """rows,bytes → rows,values. Values are stored as they are, as differences to the pixel before, or as differences of bytes."""
    predictor = _value(tags, PREDICTOR, 1)
    if predictor == FLOATING_POINT:
        summed = np.cumsum(rows.reshape(len(rows), -1, num_samples), axis=1, dtype=np.uint8)
        planes = summed.reshape(len(rows), dtype.itemsize, -1)  # the highest byte of all values, then the next
        return np.ascontiguousarray(planes.swapaxes(1, 2)).view(dtype.newbyteorder(">"))[:, :, 0].astype(dtype)
    values = rows.view(dtype.newbyteorder(">" if 0 in tags else "<")).astype(dtype, copy=False)
    if predictor == HORIZONTAL:
        whole = values.view(f"u{dtype.itemsize}").reshape(len(rows), -1, num_samples)
        values = np.cumsum(whole, axis=1, dtype=whole.dtype).reshape(values.shape).view(dtype)
    return values


def one_block_tiff(data: bytes, size: Size, tags: Tags) -> bytes:
    """A TIFF file whose only strip is the block. Its values are little-endian, unless tags hold the key 0: big-endian."""
    order = ">" if 0 in tags else "<"
    entries: dict[int, tuple[int, Sequence[int]]] = {
        **{tag: entry for tag, entry in tags.items() if tag},
        WIDTH: (LONG, [size[1]]),
        LENGTH: (LONG, [size[0]]),
        OFFSETS: (LONG, [8]),
        headers.TIFF_PLANAR: (SHORT, [INTERLEAVED]),
        ROWS_PER_STRIP: (LONG, [size[0]]),
        BYTE_COUNTS: (LONG, [len(data)]),
    }
    directory = 8 + len(data) + len(data) % 2
    place = directory + 2 + 12 * len(entries) + 4
    records, values_behind = [], []
    for tag, (kind, values) in sorted(entries.items()):
        packed = struct.pack(f"{order}{len(values)}{FORMATS[kind]}", *values)
        record = struct.pack(f"{order}HHI", tag, kind, len(values))
        if len(packed) <= 4:
            records.append(record + packed.ljust(4, b"\0"))
        else:
            packed += b"\0" * (len(packed) % 2)
            records.append(record + struct.pack(f"{order}I", place))
            values_behind.append(packed)
            place += len(packed)
    start = (b"MM\0*" if order == ">" else b"II*\0") + struct.pack(f"{order}I", directory)
    count = struct.pack(f"{order}H", len(entries))
    return b"".join([start, data, b"\0" * (len(data) % 2), count, *records, b"\0\0\0\0", *values_behind])


def _find_pages(file: tifffile.TiffFile) -> tuple[list[Page], Size, int, bool]:
    """The pages or planes of the first series (the whole image at full size, of a pyramid too), its size, how many samples it has
    and whether the last is alpha."""
    series = file.series[0]
    first: Any = series.keyframe
    pages: list[Any] = list(series.pages)
    size = int(first.imagelength), int(first.imagewidth)
    num_samples = int(first.samplesperpixel)
    num_values = size[0] * size[1] * num_samples * len(pages)
    if None in pages or first.imagedepth != 1 or int(np.prod(series.shape)) != num_values:
        raise ReadError(f"a TIFF of shape {series.shape}, which is not read by blocks")
    if num_samples * len(pages) > MAX_CHANNELS or (num_samples > 1 and len(pages) > 1):
        raise ReadError(f"a TIFF of shape {series.shape}; need height, width and up to {MAX_CHANNELS} channels")
    num_planes = num_samples if first.planarconfig == 2 else 1
    tags = _decoding_tags(first, num_planes)
    found = [_page(page, first, size, tags, plane, num_planes) for page in pages for plane in range(num_planes)]
    extra = tuple(int(kind) for kind in first.extrasamples)
    return found, size, num_samples * len(pages), bool(extra) and extra[-1] in headers.TIFF_ALPHAS


def _check_geometry(pages: Sequence[Page], size: Size) -> None:
    """Raises ReadError unless every page has the blocks that its size needs."""
    for page in pages:
        height, width = page.block_size
        if min(*size, height, width) < 1:
            raise ReadError(f"{size[1]}×{size[0]} pixels in blocks of {width}×{height}")
        num_needed = -(-size[0] // height) * -(-size[1] // width)
        if len(page.blocks) < num_needed:
            raise ReadError(f"cannot be decoded ({len(page.blocks)} blocks of {num_needed})")


def _page(page: Any, first: Any, size: Size, tags: Tags, plane: int, num_planes: int) -> Page:
    offsets, counts = list(page.dataoffsets), list(page.databytecounts)
    num_blocks = len(offsets) // num_planes
    blocks = [Block(int(offset), int(count)) for offset, count in zip(offsets, counts, strict=True)][
        plane * num_blocks : (plane + 1) * num_blocks
    ]
    if first.is_tiled:
        return Page(blocks, (int(first.tilelength), int(first.tilewidth)), tags, True)
    height = min(int(first.rowsperstrip), size[0])
    row_bits = size[1] * sum(tags[headers.TIFF_BITS][1])
    if first.compression == UNCOMPRESSED and _is_one_run(blocks):
        row_bytes = -(-row_bits // 8)
        height = max(1, STRIP_BYTES // max(1, row_bytes), size[0] // MAX_STRIPS)
        blocks = [
            Block(blocks[0].offset + top * row_bytes, min(height, size[0] - top) * row_bytes) for top in range(0, size[0], height)
        ]
    return Page(blocks, (height, size[1]), tags, False)


def _is_one_run(blocks: Sequence[Block]) -> bool:
    """Whether the strips lie one behind the other: then the rows do, and can be read in strips of any height."""
    return all(before.offset + before.num_bytes == after.offset for before, after in pairwise(blocks))


def _decoding_tags(first: Any, num_planes: int) -> Tags:
    tags: dict[int, tuple[int, Sequence[int]]] = {}
    if first.parent.byteorder == ">":
        tags[0] = (SHORT, [])
    for tag in HOW_TO_DECODE:
        if tag in first.tags:
            tags[tag] = (SHORT, list(_numbers(first.tags[tag].value)))
    if first.jpegtables is not None:
        tags[JPEG_TABLES] = (UNDEFINED, list(first.jpegtables))
    num_samples = int(first.samplesperpixel) if num_planes == 1 else 1
    tags[headers.TIFF_SAMPLES] = (SHORT, [num_samples])
    for tag, default in ((headers.TIFF_BITS, 1), (SAMPLE_FORMAT, 1)):
        values = list(_numbers(first.tags[tag].value)) if tag in first.tags else [default]
        tags[tag] = (SHORT, (values * num_samples)[:num_samples] if len(values) < num_samples else values[:num_samples])
    if num_planes > 1:
        tags[headers.TIFF_PHOTOMETRIC] = (SHORT, [MIN_IS_BLACK])
    elif headers.TIFF_EXTRA_SAMPLES in first.tags:
        extra = list(_numbers(first.tags[headers.TIFF_EXTRA_SAMPLES].value))
        tags[headers.TIFF_EXTRA_SAMPLES] = (SHORT, [0] * len(extra))  # no alpha: whether it is dropped is decided here
    return tags


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):  # an enum too
        yield int(value)
    else:
        yield from (int(item) for item in np.asarray(value).ravel())


def _num_channels(tags: Tags) -> int:
    """Of a decoded block: a palette's indices become colours."""
    is_palette = _value(tags, headers.TIFF_PHOTOMETRIC, 0) == headers.TIFF_IS_PALETTE
    return 3 if is_palette else tags[headers.TIFF_SAMPLES][1][0]


def _value(tags: Tags, tag: int, default: int) -> int:
    return tags[tag][1][0] if tag in tags else default


def _dtype(tags: Tags) -> np.dtype[Any]:
    """Raises ReadError for depths that are no numpy dtype."""
    kind, bits = {1: "u", 2: "i", 3: "f"}.get(tags[SAMPLE_FORMAT][1][0]), tags[headers.TIFF_BITS][1][0]
    if kind is None or bits not in (8, 16, 32, 64) or (kind, bits) == ("f", 8):
        raise ReadError(f"{bits}-bit values of format {tags[SAMPLE_FORMAT][1][0]}; need 8, 16, 32 or 64 bit")
    return np.dtype(f"{kind}{bits // 8}")
