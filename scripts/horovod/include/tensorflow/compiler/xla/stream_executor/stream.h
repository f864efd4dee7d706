// Stands in for a header that TensorFlow moved, and for a function that it no longer exports.
//
// horovod/tensorflow/mpi_ops.cc declares stream_executor::gpu::AsGpuStreamValue and takes its definition
// from TensorFlow's library. Since TensorFlow 2.16 it is not there, so the module would build and then fail
// to load. The stream's platform handle is the same cudaStream_t.
#pragma once
#include "xla/stream_executor/stream.h"

#if HAVE_GPU
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream *stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
}  // namespace gpu
}  // namespace stream_executor
#endif
