"""Tables in CSV files, as spreadsheets write them: any separator, a byte order mark, empty cells at the end."""

import csv
import io
from pathlib import Path
from typing import Any

from unet_trainer.images.file_bytes import DataError
from unet_trainer.system import input_files

MAX_BYTES = 2**30
MAX_HEADER = 2**14  # bytes

Row = dict[str, str]  # column → cell


def read_table(path: Path, name: str, errors: str = "surrogateescape") -> tuple[list[str], list[tuple[int, Row]]]:
    """The header of a CSV file, in lower case, and line number and cells of each row with text. Raises DataError."""
    limit = csv.field_size_limit(MAX_BYTES)
    try:
        header, reader = _open_table(input_files.read_text(path, MAX_BYTES, "utf-8-sig", errors))
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
        return _open_table(file.read(MAX_HEADER).decode("utf-8-sig", "replace"))[0]


def _open_table(text: str) -> tuple[list[str], Any]:
    """The header, without the empty cells that spreadsheets leave at its end, and the reader of the other rows. Excel
    separates cells by semicolons where numbers have commas."""
    separator = max(",;\t", key=text.split("\n", 1)[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)  # a name may hold a \r
    header = [cell.strip().lower() for cell in next(reader, [])]
    while header and not header[-1]:
        header.pop()
    return header, reader
