"""Documents of text: files, a column of a table, or those that Python's own documentation brings."""

import pydoc_data.topics
from pathlib import Path

from hvtrain.data.manifest import user_path
from hvtrain.errors import ConfigError, DataError

TABLES = (".csv", ".parquet")


def embedded() -> list[str]:
    """Python's reference by topic, as help() shows it, in the order of their names; some 400,000 characters.

    Many topics repeat parts of others, which a test part would then share with the training part. So each paragraph
    stays where it comes first.
    """
    seen: set[str] = set()
    documents = []
    for _, text in sorted(pydoc_data.topics.topics.items()):
        new = [paragraph for paragraph in dict.fromkeys(text.split("\n\n")) if paragraph not in seen]
        seen.update(new)
        documents.append("\n\n".join(new))
    return [document for document in documents if document]


def read_documents(file: str, column: str | None) -> list[str]:
    """The documents of a text file, of all .txt files in a folder, or of a column of a .csv or .parquet file.

    A file is one document, and so is each row of a column. Those that hold nothing but white space are left out.
    """
    path = user_path(file)
    if path.suffix in TABLES and path.is_file():
        documents = read_column(path, column)
    elif path.is_dir():
        documents = [read_text(one) for one in sorted(path.rglob("*.txt"))]
    else:
        documents = [read_text(path)]
    found = [document for document in documents if document.strip()]
    if not found:
        raise DataError(f"dataset.file={file} holds no text; give a text file, a folder of .txt files or a table")
    return found


def read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it, or leave it out") from error
    except OSError as error:
        raise DataError(f"dataset.file={path} cannot be read ({error.strerror}); fix the path or the file") from error


def read_column(path: Path, column: str | None) -> list[str]:
    """The texts in a column of a table, without gaps."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        if path.suffix == ".parquet":
            names = parquet.read_schema(path).names
            table = parquet.read_table(path, columns=[column] if column in names else [])
        else:
            table = csv.read_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True))
            names = table.column_names
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {str(error).splitlines()[0]}; fix the file") from error
    if column is None or column not in names:
        came = " is not set" if column is None else f"={column} is no column of {path.name}"
        raise ConfigError(f"dataset.column{came}; it names the column of text, one of {', '.join(names)}")
    texts = table[column]
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        raise DataError(f"{path}: the column {column} holds {texts.type}; a column of text is needed")
    return [text for text in texts.to_pylist() if text]
