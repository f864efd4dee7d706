"""Tokenizes text with sentencepiece models, trained on documents or read from a file."""

import io
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import sentencepiece

from hvtrain.data.manifest import user_path
from hvtrain.errors import ConfigError, DataError, first_line

# A tokenizer is trained on about this many characters; of longer texts, on evenly spaced lines.
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
