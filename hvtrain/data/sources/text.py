"""Text as rows of tokens, for models that predict the next token, masked tokens, or a label."""

import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import Tensor

from hvtrain.config.validate import check_choice, check_least
from hvtrain.core.topology import Topology
from hvtrain.data.description import format_counts
from hvtrain.data.formats.documents import (
    Tokenizer,
    cut,
    deal,
    load_tokenizer,
    python_documentation,
    read_documents,
    read_labelled,
    text_files,
    train_tokenizer,
)
from hvtrain.data.manifest import user_path
from hvtrain.data.pipeline.epochs import bucketed_batches, choose_boundaries
from hvtrain.data.pipeline.streams import Read
from hvtrain.data.pipeline.transform import fold_in
from hvtrain.data.source import Parts, Phrases
from hvtrain.data.sources.memory import (
    SPLIT_SEED,
    Elements,
    MemorySource,
    check_shares,
    names_as_text,
)
from hvtrain.errors import ConfigError

# For windows, fewer documents than this are split as one continuous text, whose end goes to
# validation and test. Otherwise, each document belongs to one split.
WHOLE_DOCUMENTS = 20
OBJECTIVES = ("causal", "masked")
EXAMPLES = ("windows", "documents", "paragraphs")
TOKENIZER_FILE = "tokenizer.model"
# Windows ends lines with \r\n.
EMPTY_LINE = r"\r?\n[^\S\n]*\n"

# Most masked tokens are replaced by the mask, some by a random token, and the rest stay, in the
# shares of BERT (https://arxiv.org/abs/1810.04805, section 3.1).
MASK_SHARE = 0.8
RANDOM_SHARE = 0.1


class Text(MemorySource):
    """A source of rows of tokens, int32 [length], cut from the joined documents or each from one document.

    Each document ends with an end token. With examples=windows, the documents are joined and cut into
    rows of the same length. Otherwise, a row is a document, or a paragraph of one, cut at `length`;
    batches are padded with token 0, which has weight 0 as a target.

    With objective=causal, the targets are the next tokens. With objective=masked, some input tokens
    are masked: different ones in each epoch of training, but the same ones in each evaluation. All
    tokens are targets, but only masked ones have weight 1.

    Example:
        python -m hvtrain dataset=text dataset.file=tales.txt task=language model=transformer

    Args:
        file: A text file, a folder of .txt files, a table (.csv, .tsv, .parquet) or a .jsonl file;
            null: Python's own documentation.
        column: The table's column of texts, or the key of the text in each line of .jsonl.
        tokenizer: A sentencepiece .model file; null: one is trained on the training part.
        vocabulary_size: Number of tokens of the tokenizer that is trained.
        length: The largest number of tokens in an example. Tokens at the end of a split that do not fill a window
            are left out.
        examples: windows, documents or paragraphs.
        label: The table's column with the class of each text; these classes are then the targets.
        objective: causal or masked.
        masked_share: Share of the tokens that are masked, for the objective masked.
        validation_share, test_share: Shares of the text: whole documents at random, with a fixed
            seed, or, for windows, the end of the text if it has fewer than WHOLE_DOCUMENTS documents.

    Raises:
        ConfigError: If a setting is out of range; once loaded, if a split is shorter than one example.
        DataError: Once loaded, if the text or the tokenizer cannot be read.
    """

    _tokenizer: Any = None
    _summary = ""
    """Description of the text, set once it is read."""

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
        examples: str = "windows",
        label: str | None = None,
    ) -> None:
        check_choice("dataset.objective", objective, OBJECTIVES)
        check_choice("dataset.examples", examples, EXAMPLES)
        check_least("dataset.length", length, 2)
        # Without masked tokens, there would be nothing to learn.
        if not 0 < masked_share < 1:
            raise ConfigError(
                f"dataset.masked_share={masked_share} is not between 0 and 1; give 0.15, for instance"
            )
        check_shares(validation_share=validation_share, test_share=test_share)
        if file is None:
            name = "python_documentation"
            origin = f"pydoc_data.topics of Python {platform.python_version()}"
        else:
            name = Path(file).stem
            origin = file

        super().__init__(name, self._rows_by_split, origin)

        self._file = file
        self._column = names_as_text(column)
        self._tokenizer_file = tokenizer
        self._vocabulary_size = vocabulary_size
        self._length = length
        self._examples = examples
        self._label = names_as_text(label)
        self._is_packed = examples == "windows" and label is None
        self._is_causal = objective == "causal" and label is None
        self._is_masked = objective == "masked" and label is None
        self._masked_share = masked_share
        self._shares = {"validation": validation_share, "test": test_share}
        self._lengths: dict[str, np.ndarray] = {}
        self._num_cut: dict[str, int] = {}  # Number of texts cut at `length`, by split.

    @property
    def tokenizer(self) -> Tokenizer:
        self.num_examples("train")
        return self._tokenizer

    @property
    def end_token(self) -> int:  # type: ignore[override]
        return self.tokenizer.end

    def facts(self) -> dict[str, Any]:
        # The mask comes after the tokenizer's own tokens.
        num_tokens = self.tokenizer.size + self._is_masked
        facts = super().facts() | {
            "vocabulary_size": num_tokens,
            "length": self._length,
            "causal": self._is_causal,
        }
        return facts if self._is_packed else facts | {"padded": True}

    @property
    def element_spec(self) -> Parts:
        spec = super().element_spec
        if self._is_packed:
            return spec
        # Batches are padded to different lengths.
        return tf.nest.map_structure(
            lambda part: tf.TensorSpec([None] * part.shape.rank, part.dtype), spec
        )

    def lengths(self, split: str) -> np.ndarray | None:
        if self._is_packed:
            return None
        self.num_examples("train")
        return self._lengths.get(split, np.zeros(0, np.int64))

    @property
    def buckets(self) -> Any:
        lengths = self.lengths("train")
        if lengths is None or not self.bucket_by_length:
            return None
        boundaries = choose_boundaries(self.bucket_by_length, self._length)
        return partial(bucketed_batches, boundaries, lengths)

    def reader(self, split: str, topology: Topology) -> Read:
        read = super().reader(split, topology)
        if self._is_packed:
            return read
        rows = self.shard_rows(split, topology)
        with tf.device("CPU:0"):
            lengths = tf.constant(self._lengths.get(split, rows)[rows], tf.int32)
            boundaries = tf.constant(
                choose_boundaries(self.bucket_by_length, self._length), tf.int32
            )

        def read_trimmed(indices, length=None):
            if length is None:
                longest = tf.reduce_max(tf.gather(lengths, indices))
                length = tf.gather(boundaries, tf.searchsorted(boundaries, longest[None]))[0]
            return tuple(
                part[:, :length] if part.shape.rank > 1 else part for part in read(indices)
            )

        return read_trimmed

    def spread(self, split: str, step: int, batch_size: int) -> tf.data.Dataset:
        # All batches have one length, since the caller joins them.
        bucket_by_length, self.bucket_by_length = self.bucket_by_length, 0
        try:
            return super().spread(split, step, batch_size)
        finally:
            self.bucket_by_length = bucket_by_length

    def description(self) -> Phrases:
        description = super().description()
        description["text"] = [self._summary, f"{self.tokenizer.size:,} tokens in the vocabulary"]
        num_cut = sum(self._num_cut.values())
        if num_cut:
            cut_phrase = f"{num_cut:,} text(s) cut at dataset.length={self._length} tokens"
            description["text"].append(cut_phrase)
        others = text_files(user_path(self._file))[1] if self._file else None
        if others:
            warning = f"{self._file}: left out files that are not .txt: {format_counts(others)}"
            description["warnings"] = [warning]
        return description

    def manifest(self) -> dict[str, Any]:
        return super().manifest() | {"tokenizer": hashlib.sha256(self.tokenizer.model).hexdigest()}

    def fitted(self) -> dict[str, bytes]:
        # The same settings would train another tokenizer if the text had changed.
        return self.assets()

    def fit_as(self, files: Mapping[str, bytes]) -> None:
        if TOKENIZER_FILE in files:
            self._tokenizer = Tokenizer(files[TOKENIZER_FILE])

    def assets(self) -> dict[str, bytes]:
        return {TOKENIZER_FILE: self.tokenizer.model}

    def text_of(self, tokens: Sequence[int]) -> str:
        length = len(tokens)
        # In a padded row, padding, token 0, follows the end of the text.
        while length and tokens[length - 1] == 0:
            length -= 1
        is_padded = not self._is_packed and length and tokens[length - 1] == self.end_token
        return self.tokenizer.decode(tokens[: length - 1] if is_padded else tokens)

    def tokens_of(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def augment(self, elements: Parts, seed: Tensor) -> Parts:
        if not self._is_masked:
            return elements
        inputs, _, weights = elements
        return self._mask(inputs, seed, weights)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset:
        batches = super().evaluation(split, topology, batch_size)
        if split != "train" or not self._is_masked:
            return batches
        # Training rows are not masked in memory, unlike those of the other splits.
        first_seed = fold_in(tf.constant([SPLIT_SEED, 0], tf.int64), topology.rank)
        return batches.enumerate().map(
            lambda number, batch: self._mask(batch[0], fold_in(first_seed, number), batch[2])
        )

    def _rows_by_split(self) -> Elements:
        """Reads the text and returns its rows of tokens, by split."""
        documents, classes = self._read()
        num_characters = sum(map(len, documents))
        self._summary = f"{len(documents):,} document(s) with {num_characters:,} characters"
        texts, targets = self._divide(documents, classes)

        # When the text is read again, or a run continues, the tokenizer stays the same.
        if self._tokenizer is None:
            if self._tokenizer_file is None:
                self._tokenizer = train_tokenizer(texts["train"], self._vocabulary_size)
            else:
                self._tokenizer = load_tokenizer(self._tokenizer_file)

        if self._is_packed:
            return {split: self._windows(split, part) for split, part in texts.items()}
        rows = {split: self._padded_rows(split, part) for split, part in texts.items()}
        # Classes replace the tokens as targets, and need no weights.
        return {split: (rows[split][0], part) for split, part in targets.items()} or rows

    def _read(self) -> tuple[list[str], list[int]]:
        """Reads the documents, or their paragraphs, and their classes, which are empty without `label`."""
        if self._label is not None:
            documents, classes, self.class_names = read_labelled(
                str(self._file), self._column, self._label
            )
            self.num_classes = len(self.class_names)
            return documents, classes
        documents = (
            python_documentation()
            if self._file is None
            else read_documents(self._file, self._column)
        )
        if self._examples == "paragraphs":
            texts = chain.from_iterable(re.split(EMPTY_LINE, text) for text in documents)
            documents = [text for text in texts if text.strip()]
        return documents, []

    def _divide(
        self, documents: Sequence[str], classes: Sequence[int]
    ) -> tuple[dict[str, list[str]], dict[str, np.ndarray]]:
        """Divides documents among the splits; returns each split's texts, and its classes if there are any."""
        targets: dict[str, np.ndarray] = {}
        if self._is_packed and len(documents) < WHOLE_DOCUMENTS:
            texts = cut(documents, **self._shares)
        else:
            indices = deal(list(map(len, documents)), **self._shares)
            texts = {split: [documents[index] for index in part] for split, part in indices.items()}
            if classes:
                labels = np.array(classes, np.int32)
                targets = {split: labels[part] for split, part in indices.items()}

        for split, share in self._shares.items():
            if share and not texts.get(split):
                raise ConfigError(
                    f"dataset.{split}_share={share} of {self._summary} rounds to nothing; raise it, or set it to 0"
                )
        return texts, targets

    def _padded_rows(self, split: str, documents: Sequence[str]) -> tuple[np.ndarray, ...]:
        """Returns the inputs, targets and weights of a split, a document per row; stores the rows' lengths."""
        size = self._length + 1
        rows = [[*self._tokenizer.encode(text), self._tokenizer.end][:size] for text in documents]
        self._num_cut[split] = sum(row[-1] != self._tokenizer.end for row in rows)
        ends = np.array(list(map(len, rows)))
        is_text = np.arange(size) < ends[:, None]
        tokens = np.zeros(is_text.shape, np.int32)
        tokens[is_text] = np.concatenate(rows)
        weights = is_text.astype(np.float32)
        self._lengths[split] = np.minimum(ends, self._length)
        if self._is_causal:
            return tokens[:, :-1], tokens[:, 1:], weights[:, 1:]
        return self._masked_rows(split, tokens[:, :-1], weights[:, :-1])

    def _windows(self, split: str, documents: Sequence[str]) -> tuple[np.ndarray, ...]:
        """Returns the windows of a split: inputs, targets and, if tokens are masked, weights.

        Raises:
            ConfigError: The text is shorter than one example.
        """
        tokens = self._tokenizer.join(documents)
        length = self._length
        # The last token has no next token to predict.
        count = (len(tokens) - self._is_causal) // length
        if count < 1:
            raise ConfigError(
                f"dataset.length={length} does not fit the {len(tokens):,} tokens of {self.name}, {split}; lower it, "
                "give more text, or change dataset.validation_share and dataset.test_share"
            )

        rows = tokens[: count * length].reshape(count, length)
        if self._is_causal:
            return rows, tokens[1 : count * length + 1].reshape(count, length)
        return self._masked_rows(split, rows, np.ones(rows.shape, np.float32))

    def _masked_rows(
        self, split: str, rows: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Returns the inputs, targets and weights of a split; masks evaluation rows. `weights` are 0 for padding."""
        if split == "train" or not self._is_masked:
            # augment() masks training rows, differently in each epoch;
            # other objectives mask nothing.
            return rows, rows, weights

        # Evaluation rows are masked once, with a fixed seed, so that they are always the same.
        with tf.device("CPU:0"):
            masked = self._mask(
                tf.constant(rows), tf.constant([SPLIT_SEED, len(rows)], tf.int64), weights
            )
        return tuple(array.numpy() for array in masked)

    def _mask(self, tokens: Tensor, seed: Tensor, weights: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Masks tokens at random; returns the inputs, the tokens as targets, and weights, 1 for masked tokens.

        A pure function of the tokens [batch, length], the seed, int64 [2], and the weights, 0 for padding.
        """
        # The tokenizer's own tokens are 0 ... size - 1.
        mask_token = self._tokenizer.size
        shape = tf.shape(tokens)
        # Tokens with draws below 1 are masked. Their draws are uniform in 0 ... 1, and select the mask, a
        # random token or no change.
        draws = tf.random.stateless_uniform(shape, seed) / self._masked_share
        draws = tf.where(weights > 0, draws, 1.0)
        random_tokens = tf.random.stateless_uniform(
            shape, fold_in(seed, 1), maxval=mask_token, dtype=tf.int32
        )

        shown = tf.where(draws < MASK_SHARE + RANDOM_SHARE, random_tokens, tokens)
        shown = tf.where(draws < MASK_SHARE, mask_token, shown)
        return shown, tokens, tf.cast(draws < 1, tf.float32)
