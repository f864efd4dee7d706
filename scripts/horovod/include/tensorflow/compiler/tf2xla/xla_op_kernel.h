// Stands in for a header that TensorFlow >= 2.16 no longer ships in the place where Horovod 0.28.1 looks.
//
// It is the first include of horovod/tensorflow/xla_mpi_ops.cc and is included by no other file of Horovod.
// Turning HAVE_GPU off here leaves the rest of that file empty: on a CPU build it is empty anyway, and on a
// GPU build it would register one XLA custom call whose interface TensorFlow has since removed.
#pragma once
#undef HAVE_GPU
#define HAVE_GPU 0
