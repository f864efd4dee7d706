// Empty on purpose: see tensorflow/compiler/tf2xla/xla_op_kernel.h in this folder.
#pragma once
