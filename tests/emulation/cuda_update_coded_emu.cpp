// Emulated: cuda_update_coded.cu.
#include "tests/emulation/kernel_emulation.h"
// The kernels come after what they are translated to.
#include "optim/cuda_update_coded.cu"
