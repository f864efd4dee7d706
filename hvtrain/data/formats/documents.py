"""Documents of text, from files, from a column of a table, or from Python's own documentation."""

import pydoc_data.topics
from pathlib import Path

from hvtrain.data.manifest import user_path
from hvtrain.errors import ConfigError, DataError

TABLES = (".csv", ".parquet")


def embedded() -> list[str]:
    """Python's reference by topic, as help() shows it; some 400,000 characters.

    In the order of the topics' names. Each paragraph stays only where it comes first.
    """
    # Many topics repeat parts of others. Otherwise the test split would share paragraphs with the
    # training split.
    seen: set[str] = set()
    documents = []
    for _, text in sorted(pydoc_data.topics.topics.items()):
        paragraphs = dict.fromkeys(text.split("\n\n"))
        new = [paragraph for paragraph in paragraphs if paragraph not in seen]
        seen.update(new)
        documents.append("\n\n".join(new))
    return [document for document in documents if document]


def read_documents(file: str, column: str | None) -> list[str]:
    """Reads documents, and leaves out those that hold nothing but white space.

    Args:
        file: A text file is one document, a folder has one in each .txt file, and a .csv or
            .parquet file one in each row.
        column: The column of text in a .csv or .parquet file.

    Raises:
        DataError: A file cannot be read, or no text is left.
        ConfigError: The table has no such column.
    """
    path = user_path(file)
    if path.suffix in TABLES and path.is_file():
        documents = read_column(path, column)
    elif path.is_dir():
        documents = [read_text(text_file) for text_file in sorted(path.rglob("*.txt"))]
    else:
        documents = [read_text(path)]

    documents = [document for document in documents if document.strip()]
    if not documents:
        raise DataError(f"dataset.file={file} holds no text; give a text file, a folder of .txt files or a table")
    return documents


def read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it, or leave it out") from error
    except OSError as error:
        raise DataError(f"dataset.file={path} cannot be read ({error.strerror}); fix the path or the file") from error


def read_column(path: Path, column: str | None) -> list[str]:
    """Reads the texts in a column of a table, without gaps."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        if path.suffix == ".parquet":
            names = parquet.read_schema(path).names
            table = parquet.read_table(path, columns=[column] if column in names else [])
        else:
            # Texts in quotes may have several lines.
            options = csv.ParseOptions(newlines_in_values=True)
            table = csv.read_csv(path, parse_options=options)
            names = table.column_names
    except (pa.ArrowException, OSError) as error:
        message = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read: {message}; fix the file") from error

    if column is None or column not in names:
        problem = " is not set" if column is None else f"={column} is not a column of {path.name}"
        raise ConfigError(f"dataset.column{problem}; it names the column of text, one of {', '.join(names)}")
    texts = table[column]
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        raise DataError(f"{path}: the column {column} holds {texts.type}; a column of text is needed")
    return [text for text in texts.to_pylist() if text]
