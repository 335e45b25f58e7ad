#!/bin/sh
# A launcher for FlashInfer's compiler that leaves out what slotline never calls:
#
#     FLASHINFER_NVCC_LAUNCHER=$PWD/benchmarks/paged_kernels_only.sh FLASHINFER_EXTRA_LDFLAGS=-Wl,-z,lazy ...
#
# Of a module's eight units of kernels (paged and ragged keys, four kinds of mask) the backend calls two: paged ones,
# plain and causal. The others become empty, which is more than half of the compiler's time. `-z lazy` lets a library
# be loaded though functions are missing that nobody calls. Keep such modules in a cache of their own
# (FLASHINFER_WORKSPACE_BASE): another program that calls a missing function would end there.
for word do
    shift
    case $word in
        *_ragged_*kernel_mask_?.cu | *_kernel_mask_[23].cu)
            word=${word%.cu}.empty.cu
            [ -e "$word" ] || touch -t 200001010000 "$word" # older than what is made of it, so ninja makes it once
            ;;
    esac
    set -- "$@" "$word"
done
exec "$@"
