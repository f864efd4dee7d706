"""Text as rows of tokens, for models that predict the next token or masked ones."""

import itertools
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.data.formats.documents import embedded, read_documents, text_files
from hvtrain.data.formats.tokenizer import (
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from hvtrain.data.manifest import user_path
from hvtrain.data.sources.memory import SPLIT_SEED, Elements, MemorySource
from hvtrain.errors import ConfigError

OBJECTIVES = ("causal", "masked")
TOKENIZER_FILE = "tokenizer.model"

WHOLE_DOCUMENTS = 20
"""Fewer documents are cut: they are one text, whose last parts are for validation and test."""

# What is shown in place of a masked token, as in BERT (https://arxiv.org/abs/1810.04805, section
# 3.1): mostly the mask, sometimes a random token, else the token itself.
MASK_SHARE = 0.8
RANDOM_SHARE = 0.1


class Text(MemorySource):
    """Rows of tokens, int32 [length], from documents that follow one another.

    Each document ends with a token for its end.

    With the objective causal, the targets are the next tokens. With masked, some tokens of the
    inputs are masked, anew in each epoch of training and always the same in evaluation; the
    targets are all tokens, and only masked ones have the weight 1.

    Example:
        python -m hvtrain dataset=text dataset.file=tales.txt task=language model=transformer

    Args:
        file: a text file, a folder of .txt files, a table (.csv, .tsv, .parquet) or a .jsonl file;
            null: Python's own documentation.
        column: of the table, with a text in each row; or the key of the text in each line of .jsonl.
        tokenizer: a .model file of sentencepiece; null: one is trained on the training part.
        vocabulary_size: of the tokenizer that is trained.
        length: tokens in an example. What does not fill the last row of a part is left out.
        objective: causal or masked.
        masked_share: of the tokens, for the objective masked.
        validation_share, test_share: of the text: whole documents at random, with a fixed seed, or
            its last parts if there are fewer than WHOLE_DOCUMENTS.

    Raises:
        ConfigError: if a setting is out of range, or a part of the text is shorter than one
            example.
    """

    def __init__(
        self,
        file: str | None = None,
        column: str | None = None,
        tokenizer: str | None = None,
        vocabulary_size: int = 2048,
        length: int = 128,
        objective: str = "causal",
        masked_share: float = 0.15,
        validation_share: float = 0.1,
        test_share: float = 0.1,
    ) -> None:
        _check(length, objective, masked_share, validation_share, test_share)
        if file is None:
            name = "python_documentation"
            origin = f"pydoc_data.topics of Python {platform.python_version()}"
        else:
            name = Path(file).stem
            origin = file

        super().__init__(name, self._rows_by_split, origin)

        self._file = file
        self._column = column
        self._tokenizer_file = tokenizer
        self._vocabulary_size = vocabulary_size
        self._length = length
        self._is_causal = objective == "causal"
        self._masked_share = masked_share
        self._shares = {"validation": validation_share, "test": test_share}
        self._tokenizer: Any = None
        self._summary = ""  # Of the text, once it is read.

    @property
    def tokenizer(self) -> Tokenizer:
        self.num_examples("train")
        return self._tokenizer

    @property
    def end_token(self) -> int:  # type: ignore[override]
        return self.tokenizer.end

    def facts(self) -> dict[str, Any]:
        num_tokens = self.tokenizer.size
        if not self._is_causal:
            num_tokens += 1  # The mask comes after the tokenizer's own tokens.
        return {
            **super().facts(),
            "vocabulary_size": num_tokens,
            "length": self._length,
            "causal": self._is_causal,
        }

    def description(self) -> dict[str, list[str]]:
        description = super().description()
        description["text"] = [self._summary, f"{self.tokenizer.size:,} tokens in the vocabulary"]
        folder = user_path(self._file or "")
        others = text_files(folder)[1] if self._file and folder.is_dir() else Counter()
        if others:
            kinds = ", ".join(f"{number} x {kind}" for kind, number in others.most_common(5))
            description["warnings"] = [f"{folder}: left out what is no .txt file: {kinds}"]
        return description

    def manifest(self) -> dict[str, Any]:
        return {**super().manifest(), "tokenizer": self.tokenizer.digest}

    def fitted(self) -> dict[str, bytes]:
        # If the text changes, the same settings would train another tokenizer.
        return self.assets()

    def fit_as(self, files: Mapping[str, bytes]) -> None:
        if TOKENIZER_FILE in files:
            self._tokenizer = Tokenizer(files[TOKENIZER_FILE])

    def assets(self) -> dict[str, bytes]:
        return {TOKENIZER_FILE: self.tokenizer.model}

    def text_of(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def tokens_of(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def augment(self, elements: tuple[Any, ...], seed: tf.Tensor) -> tuple[Any, ...]:
        if self._is_causal:
            return elements
        return self._mask(elements[0], seed)

    def _rows_by_split(self) -> Elements:
        """Reads the text, and returns its rows of tokens by split."""
        documents = embedded() if self._file is None else read_documents(self._file, self._column)
        parts = cut(documents, **self._shares)
        num_characters = sum(map(len, documents))
        self._summary = f"{len(documents):,} document(s) with {num_characters:,} characters"
        for split, share in self._shares.items():
            if share and not parts.get(split):
                raise ConfigError(
                    f"dataset.{split}_share={share} of {self._summary} rounds to nothing; raise it, or set it to 0"
                )

        # Kept when the text is read again, and when a run goes on with its first tokenizer.
        if self._tokenizer is None:
            if self._tokenizer_file is None:
                self._tokenizer = train_tokenizer(parts["train"], self._vocabulary_size)
            else:
                self._tokenizer = load_tokenizer(self._tokenizer_file)

        return {split: self._rows(split, texts) for split, texts in parts.items()}

    def _rows(self, split: str, documents: Sequence[str]) -> tuple[np.ndarray, ...]:
        """Returns the examples of a split: inputs, targets and, if tokens are masked, weights.

        Raises ConfigError if the text is shorter than one example.
        """
        tokens = self._tokenizer.join(documents)
        length = self._length
        # The last token has no next token to predict.
        num_targets = len(tokens) - 1 if self._is_causal else len(tokens)
        count = num_targets // length
        if count < 1:
            fix = "give more text"
            if split in self._shares:
                fix = f"change dataset.{split}_share={self._shares[split]}"
            raise ConfigError(
                f"dataset.length={length} does not fit the {len(tokens):,} tokens of "
                f"{self.name}, {split}; lower it or {fix}"
            )

        rows = tokens[: count * length].reshape(count, length)
        if self._is_causal:
            return rows, tokens[1 : count * length + 1].reshape(count, length)
        if split == "train":
            # augment() masks them, anew in each epoch.
            return rows, rows, np.ones(rows.shape, np.float32)

        # Evaluation is masked once, with a fixed seed, so that it is the same each time.
        with tf.device("CPU:0"):
            masked = self._mask(tf.constant(rows), tf.constant([SPLIT_SEED, count], tf.int64))
        return tuple(array.numpy() for array in masked)

    def _mask(self, tokens: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns masked inputs, the tokens as targets, and weights of 1 where they are masked.

        A pure function of the tokens [batch, length] and the seed, int64 [2].
        """
        # The tokenizer's own tokens are 0 ... size - 1.
        mask_token = self._tokenizer.size
        shape = tf.shape(tokens)
        random_seed = tf.random.experimental.stateless_fold_in(seed, tf.constant(1, tf.int64))
        # Below 1 for tokens that are masked, and then uniform in 0 ... 1.
        draws = tf.random.stateless_uniform(shape, seed) / self._masked_share
        random_tokens = tf.random.stateless_uniform(
            shape,
            random_seed,
            maxval=mask_token,
            dtype=tf.int32,
        )

        shown = tf.where(draws < MASK_SHARE + RANDOM_SHARE, random_tokens, tokens)
        shown = tf.where(draws < MASK_SHARE, mask_token, shown)
        return shown, tokens, tf.cast(draws < 1, tf.float32)


def cut(documents: Sequence[str], validation: float, test: float) -> dict[str, list[str]]:
    """Returns the documents of each split: whole ones at random, or parts if there are few.

    Args:
        documents: all texts.
        validation, test: shares of the characters.

    Example:
        >>> parts = cut(["abcdefgh", "ij"], validation=0.1, test=0.2)
        >>> {split: "".join(texts) for split, texts in parts.items()}
        {'train': 'abcdefg', 'validation': 'h', 'test': 'ij'}
    """
    lengths = [len(text) for text in documents]
    if len(documents) < WHOLE_DOCUMENTS:
        return _cut_characters(documents, _ranges(sum(lengths), validation, test))

    parts = _deal_documents(documents, lengths, validation, test)
    # One long document may cover the whole share of a split. Then documents are counted, not
    # characters.
    if not all(parts.values()):
        parts = _deal_documents(documents, [1] * len(documents), validation, test)
    return parts


def _ranges(total: int, validation: float, test: float) -> dict[str, range]:
    """Returns which characters, or documents, each split has, without empty splits."""
    train_end = round(total * (1 - validation - test))
    test_start = round(total * (1 - test))
    ranges = {
        "train": range(train_end),
        "validation": range(train_end, test_start),
        "test": range(test_start, total),
    }
    return {split: span for split, span in ranges.items() if span}


def _cut_characters(documents: Sequence[str], ranges: Mapping[str, range]) -> dict[str, list[str]]:
    """Cuts the documents as if they were one text; a document may go to several splits."""
    starts = [0, *itertools.accumulate(map(len, documents))]
    parts = {}
    for split, span in ranges.items():
        pieces = [
            text[max(span.start - start, 0) : max(span.stop - start, 0)] for start, text in zip(starts, documents)
        ]
        parts[split] = [piece for piece in pieces if piece]
    return parts


def _deal_documents(
    documents: Sequence[str], sizes: Sequence[int], validation: float, test: float
) -> dict[str, list[str]]:
    """Lays the documents in a row, in random order. Each goes to the split of its middle."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(documents))
    in_row = np.take(sizes, order)
    middles = np.empty(len(documents), np.int64)
    middles[order] = np.cumsum(in_row) - in_row + in_row // 2
    # Documents of a split keep their order.
    parts = {}
    for split, span in _ranges(sum(sizes), validation, test).items():
        parts[split] = [text for text, middle in zip(documents, middles) if span.start <= middle < span.stop]
    return parts


def _check(
    length: int,
    objective: str,
    masked_share: float,
    validation_share: float,
    test_share: float,
) -> None:
    """Raises ConfigError for settings that no text fits."""
    if objective not in OBJECTIVES:
        raise ConfigError(f"dataset.objective={objective} is not one of {', '.join(OBJECTIVES)}")
    if length < 2:
        raise ConfigError(f"dataset.length={length} is too short; an example needs at least 2 tokens")

    shares = {
        "masked_share": masked_share,
        "validation_share": validation_share,
        "test_share": test_share,
    }
    for name, share in shares.items():
        # Without any masked token there would be nothing to learn.
        lowest = 1e-6 if name == "masked_share" else 0
        if not lowest <= share < 1:
            raise ConfigError(f"dataset.{name}={share} is not a share between 0 and 1")

    if validation_share + test_share >= 1:
        raise ConfigError(
            f"dataset.validation_share={validation_share} and test_share={test_share} leave "
            "nothing to train on; lower them"
        )
