"""Named data sets as tf.data streams: each rank opens, shards, shuffles, maps, batches, prefetches.

source.py is the contract, pipeline.py the stream; every other module is one kind of source.
This room knows one process and a Topology that it is given; it never imports Horovod.
"""

from hvtrain.data.arrays import ArraySource, from_arrays
from hvtrain.data.frame import from_frame
from hvtrain.data.source import Source
from hvtrain.data.tfrecord import write_tfrecords

__all__ = ["ArraySource", "Source", "from_arrays", "from_frame", "write_tfrecords"]
