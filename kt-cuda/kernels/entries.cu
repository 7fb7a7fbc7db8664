// The kernels of one format, KT_FORMAT.

#define KT_JOIN_(a, b) a##b
#define KT_JOIN(a, b) KT_JOIN_(a, b)
#define KT_TYPE KT_JOIN(KT_FORMAT, _)
// How many blocks a multiprocessor should hold: 128 registers a thread for few rows, 255 for many.
#define KT_ENTRY(name, blocks) extern "C" __global__ void __launch_bounds__(128, blocks) KT_JOIN(name, KT_FORMAT)

KT_ENTRY(kt_few_gate_up_, 4)(const __grid_constant__ Call c) { few<KT_TYPE, false>(c); }
KT_ENTRY(kt_few_down_, 4)(const __grid_constant__ Call c) { few<KT_TYPE, true>(c); }
// Left out of the PTX that comes with the crate, where `few` does all: slower for many rows, the same bits, a fifth of the size.
#ifndef KT_FEW_ONLY
KT_ENTRY(kt_many_gate_up_, 2)(const __grid_constant__ Call c) { many<KT_TYPE, false>(c); }
KT_ENTRY(kt_many_down_, 2)(const __grid_constant__ Call c) { many<KT_TYPE, true>(c); }
#endif
