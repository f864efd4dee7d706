"""Named data sets as tf.data streams, one for each rank: sharded, shuffled, read, augmented, batched, prefetched.

All code here works in a single process, for the Topology that it is given, and never imports Horovod.
"""

from hvtrain.data.formats.record_files import write_tfrecords
from hvtrain.data.source import Source, StreamRequest
from hvtrain.data.sources.arrays import ArraySource
from hvtrain.data.sources.user_arrays import from_arrays, from_frame
from hvtrain.data.sources.user_dataset import from_dataset

__all__ = [
    "ArraySource",
    "Source",
    "StreamRequest",
    "from_arrays",
    "from_dataset",
    "from_frame",
    "write_tfrecords",
]
