"""Tokenizers: sentencepiece models, trained on a text or read from a file."""

import hashlib
import io
import re
from collections.abc import Iterable, Sequence

import numpy as np
import sentencepiece

from hvtrain.data.manifest import user_path
from hvtrain.errors import ConfigError, DataError

TRAINED_CHARACTERS = 20_000_000
"""A longer text is read in part, evenly spaced lines."""


class Tokenizer:
    """Turns text into tokens and back. A text ends with the token `end`.

    model: the contents of a sentencepiece model file. Raises RuntimeError or ValueError if it is none.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.size: int = self._processor.get_piece_size()
        if not self.size:  # sentencepiece takes an empty file.
            raise ValueError("no tokens")
        self.end: int = self._processor.eos_id()

    @property
    def digest(self) -> str:
        """SHA-256 of the model."""
        return hashlib.sha256(self.model).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; those that the tokenizer does not know, such as a masked model's mask, give none."""
        return self._processor.decode([int(token) for token in tokens if 0 <= token < self.size])

    def join(self, documents: Iterable[str]) -> np.ndarray:
        """The tokens of all documents in a row, each with its end; int32."""
        parts = [np.asarray([*self.encode(document), self.end], np.int32) for document in documents]
        return np.concatenate([np.zeros(0, np.int32), *parts])


def train_tokenizer(documents: Sequence[str], size: int) -> Tokenizer:
    """Trains byte-pair encoding of so many tokens. The same documents give the same bytes.

    Every text can be encoded, and decodes to itself: rare characters become bytes, and white space counts. Raises
    ConfigError if the documents do not have so many tokens, or need more.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines_of(documents, TRAINED_CHARACTERS)),
            model_writer=model,
            vocab_size=size,
            model_type="bpe",
            byte_fallback=True,
            user_defined_symbols=["\n"],
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=2**30,
            num_threads=1,
            minloglevel=3,
        )
    except RuntimeError as error:
        raise ConfigError(_refusal(size, str(error))) from error
    return Tokenizer(model.getvalue())


def load_tokenizer(file: str) -> Tokenizer:
    """Reads a .model file of sentencepiece. Raises DataError if it is none, or has no token for the end of a text."""
    try:
        tokenizer = Tokenizer(user_path(file).read_bytes())
    except OSError as error:
        raise DataError(f"dataset.tokenizer={file} cannot be read ({error.strerror}); fix the path") from error
    except (RuntimeError, ValueError) as error:
        raise DataError(f"dataset.tokenizer={file} is no sentencepiece model; give a .model file") from error
    if tokenizer.end < 0:
        raise DataError(f"dataset.tokenizer={file} has no token for the end of a text; train it with an eos_id")
    return tokenizer


def lines_of(documents: Sequence[str], most: int) -> list[str]:
    """The lines of all documents, or evenly spaced ones, of about `most` characters.

    >>> lines_of(["one\\ntwo\\n", "six\\n\\nten"], most=6)
    ['one', 'six']
    """
    lines = [line for document in documents for line in document.splitlines() if line]
    step = -(-sum(map(len, lines)) // most)
    return lines[:: step or 1]


def _refusal(size: int, said: str) -> str:
    """What sentencepiece says, in a line of ours."""
    setting = f"dataset.vocabulary_size={size}"
    if found := re.search(r"size too high .* value <= (\d+)", said):
        return f"{setting} is too large for the training text, which has {found[1]} tokens; lower it"
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", said):
        return f"{setting} is too small: 256 bytes and the text's characters need {found[1]}; raise it"
    return f"{setting}: sentencepiece cannot train a tokenizer: {said.splitlines()[0]}"
