"""Text as rows of tokens, for models that predict the next token or hidden ones."""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.data.formats.documents import embedded, read_documents
from hvtrain.data.formats.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from hvtrain.data.sources.memory import SPLIT_SEED, Elements, MemorySource
from hvtrain.errors import ConfigError

OBJECTIVES = ("causal", "masked")
TOKENIZER_FILE = "tokenizer.model"
WHOLE_DOCUMENTS = 20
"""Fewer documents are cut: they are one text, whose last parts are for validation and test."""
MASKED, REPLACED = 0.8, 0.1
"""Of the hidden tokens, as in BERT: those that the mask replaces, and those that another token does. Others stay."""


class Text(MemorySource):
    """Rows of tokens, int32 [length], from documents that follow one another, each with a token for its end.

    causal: the targets are the next tokens. masked: the inputs have some tokens hidden, anew in each epoch of training
    and always the same in evaluation; the targets are all tokens, and hidden ones alone have the weight 1.

    Args:
        file: a text file, a folder of .txt files, or a .csv or .parquet file; null: Python's own documentation.
        column: of the table, with a text in each row.
        tokenizer: a .model file of sentencepiece; null: one is trained on the training part.
        vocabulary_size: of the tokenizer that is trained.
        length: tokens in an example. What does not fill the last row of a part is left out.
        objective: causal or masked.
        masked_share: of the tokens, hidden for the objective masked.
        validation_share, test_share: of the text: whole documents at random, with a fixed seed, or its last parts if
            there are fewer than WHOLE_DOCUMENTS.
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
        shares = {"validation_share": validation_share, "test_share": test_share}
        _check(length, objective, masked_share=masked_share, **shares)
        name = "python_documentation" if file is None else Path(file).stem
        origin = f"pydoc_data.topics of Python {platform.python_version()}" if file is None else file
        super().__init__(name, self._rows, origin)
        self._file, self._column, self._tokenizer_file = file, column, tokenizer
        self._vocabulary_size, self._length = vocabulary_size, length
        self._masked_share = masked_share if objective == "masked" else 0.0
        self._shares = {"validation": validation_share, "test": test_share}
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Tokenizer:
        self.num_examples("train")
        return self._tokenizer

    def facts(self) -> dict[str, Any]:
        own = {"vocabulary_size": self._num_tokens, "length": self._length, "causal": not self._masked_share}
        return {**super().facts(), **own}

    def manifest(self) -> dict[str, Any]:
        return {**super().manifest(), "tokenizer": self.tokenizer.digest}

    def fitted(self) -> dict[str, bytes]:
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

    @property
    def end_token(self) -> int:  # type: ignore[override]
        return self.tokenizer.end

    def augment(self, elements: tuple[Any, ...], seed: tf.Tensor) -> tuple[Any, ...]:
        return self._hide(elements[0], seed) if self._masked_share else elements

    @property
    def _num_tokens(self) -> int:
        """Of the tokenizer, and the mask, which comes after them."""
        return self.tokenizer.size + bool(self._masked_share)

    def _rows(self) -> Elements:
        documents = embedded() if self._file is None else read_documents(self._file, self._column)
        parts = cut(documents, **self._shares)
        if self._tokenizer is None:  # Not again when the text is read again.
            if self._tokenizer_file is None:
                self._tokenizer = train_tokenizer(parts["train"], self._vocabulary_size)
            else:
                self._tokenizer = load_tokenizer(self._tokenizer_file)
        return {split: self._of_split(split, texts) for split, texts in parts.items()}

    def _of_split(self, split: str, documents: Sequence[str]) -> tuple[np.ndarray, ...]:
        tokens, length = self._tokenizer.join(documents), self._length
        next_one = 0 if self._masked_share else 1
        count = (len(tokens) - next_one) // length
        if count < 1:
            raise ConfigError(
                f"dataset.length={length} does not fit the {len(tokens):,} tokens of {self.name}, {split}; lower it or "
                + (f"change dataset.{split}_share={self._shares[split]}" if split in self._shares else "give more text")
            )
        rows = tokens[: count * length].reshape(count, length)
        if not self._masked_share:
            return rows, tokens[1 : count * length + 1].reshape(count, length)
        if split == "train":
            return rows, rows, np.ones(rows.shape, np.float32)  # Hidden when they are read; see augment.
        with tf.device("CPU:0"):
            hidden = self._hide(tf.constant(rows), tf.constant([SPLIT_SEED, count], tf.int64))
        return tuple(array.numpy() for array in hidden)

    def _hide(self, tokens: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Tokens with some hidden, all of them, and weights of 1 where they are hidden. Pure function."""
        size, shape = self._tokenizer.size, tf.shape(tokens)
        others_seed = tf.random.experimental.stateless_fold_in(seed, tf.constant(1, tf.int64))
        drawn = tf.random.stateless_uniform(shape, seed) / self._masked_share
        others = tf.random.stateless_uniform(shape, others_seed, maxval=size, dtype=tf.int32)
        shown = tf.where(drawn < MASKED, size, tf.where(drawn < MASKED + REPLACED, others, tokens))
        return shown, tokens, tf.cast(drawn < 1, tf.float32)


def cut(documents: Sequence[str], validation: float, test: float) -> dict[str, list[str]]:
    """The documents of each split, by shares of the characters: whole ones at random, or the ends of a single text.

    >>> {split: "".join(texts) for split, texts in cut(["abcdefgh", "ij"], validation=0.1, test=0.2).items()}
    {'train': 'abcdefg', 'validation': 'h', 'test': 'ij'}
    """
    lengths, splits = [len(text) for text in documents], ("train", "validation", "test")
    if len(documents) < WHOLE_DOCUMENTS:
        edges, starts = _edges(sum(lengths), validation, test), np.cumsum([0, *lengths]).tolist()
        found = {
            split: [text[max(begin - at, 0) : max(end - at, 0)] for text, at in zip(documents, starts)]
            for split, begin, end in zip(splits, edges, edges[1:])
            if begin < end
        }
        return {split: [text for text in texts if text] for split, texts in found.items()}
    order = np.random.default_rng(SPLIT_SEED).permutation(len(documents))
    found = {}
    for sizes in (lengths, [1] * len(documents)):  # By number, where a long document leaves a part empty.
        edges, places = _edges(sum(sizes), validation, test), {}
        ends = np.cumsum([sizes[index] for index in order]).tolist()
        for index, end in zip(order, ends):  # A document belongs where its middle is.
            middle = end - sizes[index] + sizes[index] // 2
            places[index] = splits[sum(middle >= edge for edge in edges[1:3])]
        found = {split: [text for i, text in enumerate(documents) if places[i] == split] for split in splits}
        found = {split: found[split] for split, begin, end in zip(splits, edges, edges[1:]) if begin < end}
        if all(found.values()):
            break
    return found


def _edges(total: int, validation: float, test: float) -> list[int]:
    """Where the training, validation and test parts of so many characters or documents begin, and the end."""
    return [0, round(total * (1 - validation - test)), round(total * (1 - test)), total]


def _check(length: int, objective: str, **shares: float) -> None:
    """Raises ConfigError for settings that no text fits."""
    if objective not in OBJECTIVES:
        raise ConfigError(f"dataset.objective={objective} is not one of {', '.join(OBJECTIVES)}")
    if length < 2:
        raise ConfigError(f"dataset.length={length} is too short; an example needs at least 2 tokens")
    for name, share in shares.items():
        low = 0 if name != "masked_share" else 1e-6
        if not low <= share < 1:
            raise ConfigError(f"dataset.{name}={share} is not a share between 0 and 1")
    if shares["validation_share"] + shares["test_share"] >= 1:
        raise ConfigError(
            "dataset.validation_share={validation_share} and test_share={test_share} leave nothing to train on; "
            "lower them".format(**shares)
        )
