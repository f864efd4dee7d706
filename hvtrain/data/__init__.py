"""Named data sets as tf.data streams, one for each rank: sharded, shuffled, read, augmented, batched, prefetched.

Everything here knows one process and the Topology that it is given, and never imports Horovod.
"""

from hvtrain.data.formats.record_files import write_tfrecords
from hvtrain.data.source import Source, StreamRequest
from hvtrain.data.sources.arrays import ArraySource, from_arrays
from hvtrain.data.sources.frame import from_frame
from hvtrain.data.sources.own_pipeline import from_dataset

__all__ = ["ArraySource", "Source", "StreamRequest", "from_arrays", "from_dataset", "from_frame", "write_tfrecords"]
