// Marks a function whose plain loops the compiler should vectorise once per instruction set, the
// best being chosen at program start. Bits do not depend on the choice: -ffp-contract=off, and no
// floating-point reduction is reordered.
#pragma once

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__clang__)
#define OVERSPILL_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define OVERSPILL_SIMD  // sanitizer runtimes are not up yet when ifuncs resolve
#endif
