"""Reads text documents from files, a column of a table, or Python's own documentation, and splits them.

Also tokenizes them, with sentencepiece models that are trained on documents or read from a file.
"""

import io
import itertools
import pydoc_data.topics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
import sentencepiece

from hvtrain.data.formats.cell_texts import numbers_in, sort_by_value
from hvtrain.data.formats.columns import Column, plain, read
from hvtrain.data.formats.folders import files_below, is_junk, read_text
from hvtrain.data.formats.row_groups import is_text
from hvtrain.data.formats.schema import FEW_NAMES
from hvtrain.data.formats.tables import is_table, read_table
from hvtrain.data.manifest import user_path
from hvtrain.errors import ConfigError, DataError, first_line

JSON_LINES = (".jsonl", ".ndjson", ".json")

# Fixed, so that every run holds out the same documents, whatever its own seed.
SPLIT_SEED = 0


def python_documentation() -> list[str]:
    """Returns Python's reference by topic, as help() shows it; about 400,000 characters.

    Documents are sorted by topic. Each paragraph is kept only where it first occurs.
    """
    # Many topics share paragraphs, which could otherwise end up in both
    # the training and the test split.
    seen = set()
    documents = []
    for _, text in sorted(pydoc_data.topics.topics.items()):
        paragraphs = dict.fromkeys(text.split("\n\n"))
        new = [paragraph for paragraph in paragraphs if paragraph not in seen]
        seen.update(new)
        documents.append("\n\n".join(new))
    return [document for document in documents if document]


def read_documents(file: str, column: str | None) -> list[str]:
    """Reads documents, leaving out those that are only white space.

    Args:
        file: A text file (one document), a folder (one per .txt file), a table (one per row) or a
            .jsonl file (one per line).
        column: The column of text in a table, or the key of text in a .jsonl file.

    Raises:
        DataError: A file cannot be read, or no text is left.
        ConfigError: The table has no such column.
    """
    path = user_path(file)
    if has_columns(path):
        documents = read_texts(path, column)
    elif path.is_dir():
        documents = [read_text(text_file) for text_file in text_files(path)[0]]
    else:
        documents = [read_text(path)]

    texts = [document for document in documents if document and document.strip()]
    if not texts:
        raise _no_text_error(file)
    return texts


def _no_text_error(file: str) -> DataError:
    return DataError(
        f"dataset.file={file} holds no text; give a text file, a folder of .txt files or a table"
    )


def text_files(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Lists the .txt files in a folder and its subfolders, sorted, and counts all other files by suffix."""
    texts = []
    others = Counter[str]()
    # Junk is, for example, ._tale.txt, which macOS writes beside tale.txt.
    for path in files_below(folder, is_junk):
        if path.suffix.lower() == ".txt":
            texts.append(path)
        else:
            others[path.suffix or path.name] += 1
    return texts, others


def read_labelled(
    file: str, column: str | None, label: str
) -> tuple[list[str], list[int], list[str]]:
    """Reads documents with their labels, from two columns of a table or two keys of a .jsonl file.

    Returns:
        The documents, the class of each as an index, and the class names, sorted (by value if all are numbers).

    Raises:
        ConfigError: The file is not a table, lacks a column, or has too many labels for classes.
        DataError: There is no text, a text has no label, or all texts have the same label.
    """
    path = user_path(file)
    if not has_columns(path):
        raise ConfigError(
            f"dataset.label={label} needs a table or a .jsonl file, which dataset.file={file} is not"
        )
    cells = plain(read_column(path, "dataset.label", label))
    labels = read(Column(label, label, "name"), cells, str(path)).values.to_pylist()
    rows = [
        (text, value)
        for text, value in zip(read_texts(path, column), labels)
        if text and text.strip()
    ]
    if not rows:
        raise _no_text_error(file)
    names = _class_names([value for _, value in rows], label, path)
    indices = {name: index for index, name in enumerate(names)}
    return [text for text, _ in rows], [indices[value] for _, value in rows], names


def _class_names(labels: Sequence[Any], label: str, path: Path) -> list[str]:
    """Returns the distinct labels of all texts, sorted. Raises the errors of read_labelled()."""
    num_gaps = labels.count(None)
    if num_gaps:
        raise DataError(
            f"{path}: {num_gaps:,} of {len(labels):,} texts have no {label}; fill the column, or leave those rows out"
        )
    names = sorted(set(labels))
    if len(names) == 1:
        raise DataError(
            f"{path}: {label} is {names[0]!r} for every text, and nothing can be learned from it; "
            "choose another column"
        )
    # Classes with few texts are common, but a column of mostly unique values is not a label.
    if len(names) > max(FEW_NAMES, len(labels) // 2):
        raise ConfigError(
            f"dataset.label={label} has {len(names):,} values for {len(labels):,} texts, too many for classes; "
            "choose another column"
        )
    return names if numbers_in(pa.array(names)).null_count else sort_by_value(names)


def has_columns(path: Path) -> bool:
    """True for a table or a JSON-lines file, in which texts are in a named column or key."""
    return path.is_file() and (is_table(path) or path.suffix.lower() in JSON_LINES)


def read_texts(path: Path, column: str | None) -> list[str | None]:
    """Reads a column of text; None for a gap. Raises DataError if the column holds anything else."""
    texts = read_column(path, "dataset.column", column)
    if not is_text(texts.type):
        raise DataError(
            f"{path}: the column {column} holds {texts.type}; a column of text is needed"
        )
    return texts.to_pylist()


def read_column(path: Path, setting: str, column: str | None) -> pa.ChunkedArray:
    """Reads a column of a table, or a key of a file with a JSON object on each line.

    Messages refer to `setting`, the user's setting that names the column.

    Raises:
        ConfigError: There is no such column.
        DataError: The file cannot be read, or a line is not a JSON object.
    """
    if path.suffix.lower() in JSON_LINES:
        try:
            # Arrow needs each line to fit into one block, of at most 2 GiB, and a
            # line may be as long as the file.
            block_bytes = min(max(path.stat().st_size, 1), 2**31 - 1)
            options = pa.json.ReadOptions(block_size=block_bytes, use_threads=False)
            table = pa.json.read_json(path, read_options=options)
            table.validate(full=True)  # Arrow does not check the UTF-8 of what it reads.
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path} cannot be read: {first_line(error)}; each line must be a JSON object"
            ) from error
    else:
        table = read_table(path, "dataset.file", column=column or "")
    names = table.column_names
    if column is None or column not in names:
        raise ConfigError(
            f"{setting}={column or 'null'} is not a column of {path.name}; choose one of {', '.join(names)}"
        )
    return table[column]


def cut(documents: Sequence[str], validation: float, test: float) -> dict[str, list[str]]:
    """Cuts documents in order, as if they were one text: its end goes to validation and test.

    A document may be spread over several splits.

    Args:
        documents: All texts of the data set.
        validation, test: Shares of the characters.

    Returns:
        The texts of each split, without empty splits.

    Example:
        >>> parts = cut(["abcdefgh", "ij"], validation=0.1, test=0.2)
        >>> {split: "".join(texts) for split, texts in parts.items()}
        {'train': 'abcdefg', 'validation': 'h', 'test': 'ij'}
    """
    starts = [0, *itertools.accumulate(map(len, documents))]
    parts = {}
    for split, span in _ranges(starts[-1], validation, test).items():
        pieces = [
            text[max(span.start - start, 0) : max(span.stop - start, 0)]
            for start, text in zip(starts, documents)
        ]
        parts[split] = list(filter(None, pieces))
    return parts


def deal(lengths: Sequence[int], validation: float, test: float) -> dict[str, list[int]]:
    """Deals documents to splits at random, by length in characters; returns the indices of each split's documents."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(lengths))
    # One long document may cover the whole span of a split, which would then stay empty. In that
    # case, documents are counted instead of characters.
    for sizes in (lengths, [1] * len(lengths)):
        # Documents are laid end to end in random order; each goes to the
        # split that contains its middle.
        shuffled = np.take(sizes, order)
        middles = np.empty(len(sizes), np.int64)
        middles[order] = np.cumsum(shuffled) - shuffled + shuffled // 2
        # Within a split, documents keep their original order.
        parts = {
            split: [index for index, middle in enumerate(middles.tolist()) if middle in span]
            for split, span in _ranges(sum(sizes), validation, test).items()
        }
        if all(parts.values()):
            break
    return parts


def _ranges(total: int, validation: float, test: float) -> dict[str, range]:
    """Returns the range of characters, or documents, of each split, without empty splits."""
    train_end = round(total * (1 - validation - test))
    test_start = round(total * (1 - test))
    ranges = {
        "train": range(train_end),
        "validation": range(train_end, test_start),
        "test": range(test_start, total),
    }
    return {split: span for split, span in ranges.items() if span}


# A tokenizer is trained on at most about this many characters: evenly spaced lines of longer texts.
TRAINED_CHARACTERS = 20_000_000


class Tokenizer:
    """Turns text into tokens and back. The token `end` marks the end of a text.

    Args:
        model: Content of a sentencepiece model file.

    Raises:
        RuntimeError: The content is not a model.
        ValueError: The content is empty, or no token marks the end of a text.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size = self._processor.get_piece_size()
        self.end = self._processor.eos_id()
        if self.end < 0:  # Also for an empty file, which sentencepiece accepts.
            raise ValueError("no token marks the end of a text")

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Turns tokens into text, ignoring those that are not the tokenizer's, such as a masked model's mask."""
        return self._processor.decode([int(token) for token in tokens if 0 <= token < self.size])

    def join(self, documents: Iterable[str]) -> np.ndarray:
        """Concatenates the tokens of all documents, int32, with the end token after each."""
        rows = ([*self.encode(text), self.end] for text in documents)
        return np.fromiter(chain.from_iterable(rows), np.int32)


def train_tokenizer(documents: Sequence[str], size: int) -> Tokenizer:
    """Trains a byte-pair encoding of `size` tokens. The same documents give the same model, byte for byte.

    Every text can be encoded, and decodes to itself. The one exception is U+2581, by which
    sentencepiece represents a space: it becomes a space.

    Raises:
        ConfigError: The documents yield fewer tokens than `size`, or need more.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines_of(documents, TRAINED_CHARACTERS)),
            model_writer=model,
            vocab_size=size,
            model_type="bpe",
            # Rare characters become bytes, so that every text can be encoded.
            byte_fallback=True,
            # White space is preserved, so that source code decodes to itself.
            user_defined_symbols=["\n"],
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            # sentencepiece leaves out longer lines; its default is 4192 bytes.
            max_sentence_length=2**30,
            num_threads=1,
            minloglevel=3,
        )
    except RuntimeError as error:
        # sentencepiece puts a location in its source code before the problem.
        problem = first_line(error).rpartition("] ")[2]
        raise ConfigError(
            f"dataset.vocabulary_size={size} does not suit the training text: {problem}"
        ) from error
    return Tokenizer(model.getvalue())


def load_tokenizer(file: str) -> Tokenizer:
    """Reads a sentencepiece .model file.

    Raises:
        DataError: The file cannot be read, is not a sentencepiece model, or has no token for the end of a text.
    """
    try:
        return Tokenizer(user_path(file).read_bytes())
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"dataset.tokenizer={file} cannot be used: {first_line(error)}; give a sentencepiece .model file that was "
            "trained with an eos_id"
        ) from error


def lines_of(documents: Sequence[str], max_characters: int) -> list[str]:
    """Returns the lines of all documents, or evenly spaced ones to stay near max_characters.

    >>> lines_of(["one\\ntwo\\n", "six\\n\\nten"], max_characters=6)
    ['one', 'six']
    """
    # Lines are taken from the whole text, since its beginning may be about a single topic.
    lines = [line for document in documents for line in document.splitlines() if line]
    step = -(-sum(map(len, lines)) // max_characters)
    return lines[:: step or 1]
