"""What a file is that cannot be read as an image, and what to do with it: by its first bytes, or by its extension."""

from __future__ import annotations

from pathlib import Path

HEIC = "a photo in Apple's HEIC format; convert it to JPEG or PNG (on a Mac: sips -s format png FILE --out FOLDER)"
AVIF = "an AVIF picture; convert it to PNG or JPEG"
DICOM = "a DICOM file; save its slices as 16-bit PNG or TIFF (pydicom reads them, dcm2niix makes volumes)"
NIFTI = "a NIfTI volume; save its slices as TIFF or .npy, one file a slice (nibabel reads them)"
VOLUME = "a volume of medical images; save its slices as TIFF or .npy, one file a slice (SimpleITK reads them)"
ARCHIVE = "an archive; unpack it, and set data_dir to the folder"
TAR = f"{ARCHIVE} (or, if it is a shard, decompress it: shards are plain .tar)"
LFS = "a pointer of git-lfs, not the file itself; run git lfs pull where the repository was cloned"
VIDEO = "a video; save its frames as images (ffmpeg -i FILE frames/%06d.png)"
WEB_PAGE = "a web page; the download failed and saved the site's answer: download it again"
ANNOTATION = "a text, not an image"
HDF5 = "an HDF5 or MATLAB file; save each image in it as .npy or TIFF (h5py and scipy.io read them)"
PDF = "a PDF; save its pages as images"
SVG = "a vector drawing; save it as PNG"
PHOTOSHOP = "a Photoshop file; save it as PNG or TIFF"

EXTENSIONS = {
    **dict.fromkeys((".heic", ".heif"), HEIC),
    ".avif": AVIF,
    **dict.fromkeys((".dcm", ".dicom", ".ima"), DICOM),
    **dict.fromkeys((".nii", ".nii.gz"), NIFTI),
    **dict.fromkeys((".mha", ".mhd", ".nrrd"), VOLUME),
    **dict.fromkeys((".zip", ".tar", ".7z", ".rar", ".gz"), ARCHIVE),
    **dict.fromkeys((".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"), TAR),
    **dict.fromkeys((".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv"), VIDEO),
    **dict.fromkeys((".h5", ".hdf5", ".mat"), HDF5),
    ".pdf": PDF,
    ".svg": SVG,
    ".psd": PHOTOSHOP,
}
STARTS = {
    b"version https://git-lfs.github.com/spec/": LFS,
    b"PK\x03\x04": ARCHIVE,
    b"PK\x05\x06": ARCHIVE,
    b"\x1f\x8b": ARCHIVE,
    b"7z\xbc\xaf\x27\x1c": ARCHIVE,
    b"Rar!\x1a\x07": ARCHIVE,
    b"BZh": ARCHIVE,
    b"\xfd7zXZ\0": ARCHIVE,
    b"\x1aE\xdf\xa3": VIDEO,  # Matroska, WebM
    b"\0\0\x01\xba": VIDEO,  # MPEG
    b"\0\0\x01\xb3": VIDEO,
    b"\x89HDF\r\n\x1a\n": HDF5,
    b"MATLAB 5.0": HDF5,
    b"NRRD0": VOLUME,
    b"%PDF-": PDF,
    b"8BPS": PHOTOSHOP,
}
BRANDS: tuple[tuple[tuple[bytes, ...], str], ...] = (  # of ISO media files: bytes 8 to 12
    ((b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1"), HEIC),
    ((b"avif", b"avis"), AVIF),
)
PLACES: tuple[tuple[int, bytes, str], ...] = (
    (128, b"DICM", DICOM),
    (344, b"n+1\0", NIFTI),
    (344, b"ni1\0", NIFTI),
    (4, b"n+2\0", NIFTI),
    (4, b"ni2\0", NIFTI),
    (257, b"ustar", ARCHIVE),
    (8, b"AVI ", VIDEO),
)
HEAD_BYTES = 512


def describe_content(data: bytes) -> str | None:
    """What a file is by its first bytes, with the fix; None if it is nothing that is known here."""
    found = next((text for start, text in STARTS.items() if data.startswith(start)), None)
    found = found or next((text for place, mark, text in PLACES if data[place : place + len(mark)] == mark), None)
    if found is None and data[4:8] == b"ftyp":
        found = next((text for brands, text in BRANDS if data[8:12] in brands), VIDEO)
    if found is None:
        found = _describe_text(data[:HEAD_BYTES])
    return found


def _describe_text(head: bytes) -> str | None:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return WEB_PAGE
    if text.startswith(b"<svg") or (text.startswith(b"<?xml") and b"<svg" in text):
        return SVG
    return ANNOTATION if text.startswith((b"{", b"[", b"<?xml")) else None


def extension_of(path: Path) -> str:
    """.gz with what stands before it: .nii.gz, .tar.gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    joined = "".join(suffixes[-2:])
    return joined if joined in EXTENSIONS else (suffixes[-1] if suffixes else "")


def describe_file(path: Path) -> str | None:
    """What a file is by its extension or, where it has none, by its first bytes; None for anything else."""
    extension = extension_of(path)
    if extension:
        return EXTENSIONS.get(extension)
    try:
        with path.open("rb") as file:
            return describe_content(file.read(HEAD_BYTES))
    except OSError:
        return None
