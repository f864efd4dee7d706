"""What all sources of files share: examples that cannot be read are named, or left out and told."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.formats.record_framing import LEAVE_OUT
from hvtrain.data.manifest import of_files
from hvtrain.data.pipeline.decode import decoded_pixels
from hvtrain.data.pipeline.streams import Then
from hvtrain.data.pipeline.transform import Transform
from hvtrain.data.pipeline.unreadable import Careful, Keys, Read, failed_key
from hvtrain.data.preprocessing import Preprocessing
from hvtrain.data.source import Source, Unreadable
from hvtrain.errors import DataError

SEARCH_SECONDS = 5.0


class FileSource(Source):
    """A source that reads batches with read_carefully, and finds an example again by its key.

    Its files hold encoded images of any size; a source whose files hold pixels says so in preprocessing().
    """

    transform: Transform = Transform()

    @cached_property
    def _lost(self) -> dict[str, Unreadable]:
        """Whole files, or pieces of them, that were left out. By place, so that each counts once."""
        return {}

    @cached_property
    def _told(self) -> set[str]:
        return set()

    @abstractmethod
    def paths(self, split: str) -> list[str]:
        """The files of a split."""

    def manifest(self) -> dict[str, Any]:
        found = super().manifest()
        for split, part in found["splits"].items():
            part.update(of_files(Path(self.origin), self.paths(split)))
        return found

    def preprocessing(self) -> Preprocessing:
        return decoded_pixels(self.image_shape, self.transform)

    @property
    def skips(self) -> bool:
        return self.on_error == "skip"

    @cached_property
    def _careful(self) -> Careful:
        return Careful(self.skips)

    def lose(self, place: str, why: str, num_examples: int | None = None) -> None:
        """Notes a file or a piece of one that is left out."""
        self._lost[place] = Unreadable(place, why, num_examples)

    @abstractmethod
    def locate(self, key: str) -> tuple[str, str]:
        """Where the example of that key lies, for people, and why it cannot be read."""

    def search(self, error: Exception) -> Exception:
        """What explain() answers to errors that hold no key."""
        return error

    def read_carefully(
        self,
        steps: tf.data.Dataset,
        read: Read,
        keys: Keys,
        then: Then,
        topology: Topology,
        batch_size: int | None = None,
        num_local: int = 0,
    ) -> tf.data.Dataset:
        """(step, batch...) -> then(step, images, labels), in order; for evaluation with batch_size and num_local."""
        if batch_size and num_local:
            return self._careful.evaluation(steps, read, keys, then, topology, batch_size)
        return self._careful.training(steps, read, keys, then, topology)

    def unreadable(self) -> list[Unreadable]:
        new = [Unreadable(*self.locate(key), 1) for key in self._careful.new_keys()]
        lost = [item for item in list(self._lost.values()) if item.place not in self._told]
        self._told.update(item.place for item in lost)
        return new + lost

    def explain(self, error: Exception) -> Exception:
        key, whole_batch = failed_key(error)
        if key is None:
            return self.search(error)
        place, why = self.locate(key) if key else (self.origin, "")
        if whole_batch:
            return DataError(
                f"{place}: {why}; and no other example of its batch can be read, so that data.on_error=skip has "
                f"nothing to put in its place; look at the files and the settings of dataset"
            )
        return DataError(f"{place}: {why}; mend or remove it, {LEAVE_OUT}")
