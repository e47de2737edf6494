"""Tables in CSV files, as spreadsheets write them: any separator, a byte order mark, empty cells at the end."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from unet_trainer.images.file_bytes import DataError
from unet_trainer.system import input_files

MAX_BYTES = 2**30
MAX_HEADER = 2**14  # bytes

Row = dict[str, str]  # column → cell


def read_table(path: Path, name: str, errors: str = "surrogateescape") -> tuple[list[str], list[tuple[int, Row]]]:
    """The header of a CSV file, in lower case, and line number and cells of each row with text. Raises DataError."""
    limit = csv.field_size_limit(MAX_BYTES)
    try:
        text = input_files.read_text(path, MAX_BYTES, "utf-8-sig", errors)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(text))  # a name may hold a \r
        header = _clean_header(next(reader, []))
        rows, line = [], reader.line_num + 1  # in which a row begins
        for cells in reader:
            if any(cell.strip() for cell in cells):
                rows.append((line, dict(zip(header, cells, strict=False))))
            line = reader.line_num + 1
        return header, rows
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror or error})") from None
    except csv.Error as error:
        raise DataError(f"{name} is not a CSV file ({error})") from None
    finally:
        csv.field_size_limit(limit)


def read_header(path: Path) -> list[str]:
    """The columns of a CSV file, by its first bytes, in lower case. Raises OSError."""
    with input_files.open_file(path) as file:
        text = file.read(MAX_HEADER).decode("utf-8-sig", "replace")
    return _clean_header(next(csv.reader(text.splitlines()[:1], delimiter=_separator(text)), []))


def _clean_header(cells: Sequence[str]) -> list[str]:
    """Without the empty ones at the end, as spreadsheets write them where cells beside the table were once filled."""
    header = [cell.strip().lower() for cell in cells]
    while header and not header[-1]:
        header.pop()
    return header


def _separator(text: str) -> str:
    """Of the cells: Excel writes semicolons where numbers have commas."""
    return max(",;\t", key=text.split("\n", 1)[0].count)
