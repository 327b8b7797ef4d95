"""The copy in Triton; a module of its own, since not every torch comes with Triton."""

import triton
import triton.language as tl


@triton.jit
def sm_copy(source, target, count, repeats, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201, N803 (Triton's dialect)
    for _ in range(repeats):
        for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(target + at, tl.load(source + at))
