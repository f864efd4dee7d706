"""Documents of text, from files, from a column of a table, or from Python's own documentation."""

import pydoc_data.topics
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.json

from hvtrain.data.formats.folders import is_junk
from hvtrain.data.formats.tables import is_table, read_table
from hvtrain.data.manifest import user_path
from hvtrain.errors import ConfigError, DataError

JSON_LINES = (".jsonl", ".ndjson", ".json")


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
        file: A text file is one document, a folder has one in each .txt file, a table one in each
            row, and a .jsonl file one in each line.
        column: The column of text in a table, or the key of text in a .jsonl file.

    Raises:
        DataError: A file cannot be read, or no text is left.
        ConfigError: The table has no such column.
    """
    path = user_path(file)
    if path.is_file() and (is_table(path) or path.suffix.lower() in JSON_LINES):
        documents = read_column(path, column)
    elif path.is_dir():
        documents = [read_text(text_file) for text_file in text_files(path)[0]]
    else:
        documents = [read_text(path)]

    documents = [document for document in documents if document.strip()]
    if not documents:
        raise DataError(f"dataset.file={file} holds no text; give a text file, a folder of .txt files or a table")
    return documents


def text_files(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Lists the .txt files in a folder and below, sorted, and counts all other files by suffix."""
    texts = []
    others: Counter[str] = Counter()
    for path in sorted(folder.rglob("*")):
        # Such as ._tale.txt, which macOS writes beside tale.txt.
        if not path.is_file() or any(is_junk(part) for part in path.relative_to(folder).parts):
            continue
        if path.suffix.lower() == ".txt":
            texts.append(path)
        else:
            others[path.suffix or path.name] += 1
    return texts, others


def read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it, or leave it out") from error
    except OSError as error:
        raise DataError(f"dataset.file={path} cannot be read ({error.strerror}); fix the path or the file") from error


def read_column(path: Path, column: str | None) -> list[str]:
    """Reads the texts in a column of a table, without gaps."""
    if path.suffix.lower() in JSON_LINES:
        table = read_json_lines(path)
    else:
        table = read_table(path, "dataset.file", column=column or "")
    names = table.column_names
    if column is None or column not in names:
        problem = " is not set" if column is None else f"={column} is not a column of {path.name}"
        raise ConfigError(f"dataset.column{problem}; it names the column of text, one of {', '.join(names)}")
    texts = table[column]
    if pa.types.is_dictionary(texts.type):
        texts = texts.cast(texts.type.value_type)
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        raise DataError(f"{path}: the column {column} holds {texts.type}; a column of text is needed")
    return [text for text in texts.to_pylist() if text]


def read_json_lines(path: Path) -> pa.Table:
    """Reads a file with a JSON object in each line, whose keys are columns.

    Raises:
        DataError: It is none.
    """
    try:
        # A line has to fit into a block, and may be as long as the file.
        options = pa.json.ReadOptions(block_size=max(path.stat().st_size, 1), use_threads=False)
        return pa.json.read_json(path, read_options=options)
    except (OSError, pa.ArrowException) as error:
        problem = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read: {problem}; an object in each line is needed") from error
