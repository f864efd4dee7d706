"""Horovod's Keras interface, made to work on Keras 3: `import hvtrain.keras as hvd`.

Names and arguments are those of horovod.tensorflow.keras and horovod.keras. The core (init, ranks, collectives) is
Horovod's. What Keras 3 broke (optimizer, callbacks, broadcast of variables, elastic state) is implemented here.
"""

# ruff: noqa: F401  (what is imported here is the interface)
from horovod.tensorflow import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    add_process_set,
    allgather_object,
    alltoall,
    broadcast_object,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.tensorflow.mpi_ops import ProcessSet

from hvtrain.keras import callbacks, elastic
from hvtrain.keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    ReductionCheckCallback,
    StopTogetherCallback,
    WeightCheckCallback,
)
from hvtrain.keras.collectives import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_model,
    broadcast_variables,
    reducescatter,
)
from hvtrain.keras.devices import pin_gpu
from hvtrain.keras.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    is_distributed,
    load_model,
    num_reductions,
    ranks_at_fault,
)
from hvtrain.keras.process import init, is_elastic
from hvtrain.keras.sync_batch_norm import SyncBatchNormalization
from hvtrain.keras.tape import DistributedGradientTape, PartialDistributedGradientTape, num_tape_reductions
