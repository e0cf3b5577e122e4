// What marks a function that the CPU kernels, the CUDA kernels and the tests share.
#pragma once

// Inlined by force: on a CPU no vector register survives a call, and the linker must not mix copies made for different
// instruction sets; on a GPU a call would go through a stack frame.
#if defined(__CUDACC__)
#define M2PO_SHARED __host__ __device__ __forceinline__
#else
#define M2PO_SHARED [[gnu::always_inline]] inline
#endif
