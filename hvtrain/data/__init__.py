"""Named data sets as tf.data streams: each rank opens, shards, shuffles, maps, batches, prefetches.

source.py is the contract, pipeline.py the stream, careful.py and files.py what becomes of examples that cannot be
read, manifest.py how one data set is told from another; every other module is one kind of source.
This room knows one process and a Topology that it is given; it never imports Horovod.
"""

from hvtrain.data.formats.record_writer import write_tfrecords
from hvtrain.data.source import Source
from hvtrain.data.sources.arrays import ArraySource, from_arrays
from hvtrain.data.sources.frame import from_frame

__all__ = ["ArraySource", "Source", "from_arrays", "from_frame", "write_tfrecords"]
