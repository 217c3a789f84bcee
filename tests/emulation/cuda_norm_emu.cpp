// Emulated: cuda_norm.cu.
#include "tests/emulation/kernel_emulation.h"
// The kernels come after what they are translated to.
#include "engine/model/cuda_norm.cu"
