// Emulated: cuda_embedding.cu.
#include "tests/emulation/kernel_emulation.h"
// The kernels come after what they are translated to.
#include "engine/model/cuda_embedding.cu"
