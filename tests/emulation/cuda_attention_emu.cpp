// Emulated: cuda_attention.cu.
#include "tests/emulation/kernel_emulation.h"
// The kernels come after what they are translated to.
#include "engine/model/cuda_attention.cu"
