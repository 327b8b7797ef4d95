import pytest

from lightning_freescale.profiling.reporting.idle import Breakdown, temporal_breakdown


def _kernel(start, end, name="gemm", cat="kernel", stream=7):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": f"kineto: stream {stream}"}


def _shares(*kernels):
    found = temporal_breakdown(kernels)
    return pytest.approx((found.idle, found.compute, found.other))


def test_idle_is_what_no_stream_fills():
    assert _shares(_kernel(10, 12), _kernel(11, 14, stream=8), _kernel(18, 20)) == (0.4, 0.6, 0.0)


def test_time_outside_the_first_and_last_kernel_does_not_count():
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 100.0}
    assert _shares(operator, _kernel(10, 20)) == (0.0, 1.0, 0.0)


def test_a_kernel_inside_a_longer_one_counts_once():
    assert _shares(_kernel(0, 10), _kernel(2, 3), _kernel(4, 5), _kernel(15, 20)) == (0.25, 0.75, 0.0)


def test_kernels_need_no_order():
    assert _shares(_kernel(15, 20), _kernel(0, 10)) == (0.25, 0.75, 0.0)


@pytest.mark.parametrize(
    ("name", "cat"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "kernel"),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy"),
        ("Memset (Device)", "gpu_memset"),
    ],
)
def test_communication_and_memory_count_where_no_compute_hides_them(name, cat):
    assert _shares(_kernel(0, 6), _kernel(4, 10, name, cat, stream=20)) == (0.0, 0.6, 0.4)
    assert _shares(_kernel(0, 10), _kernel(4, 10, name, cat, stream=20)) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("name", ["void at::native::vectorized_elementwise_kernel<4>()", "sm90_xmma_gemm", "my_ncclKernel"])
def test_everything_else_is_compute(name):
    assert _shares(_kernel(0, 10, name)) == (0.0, 1.0, 0.0)


def test_without_kernels_there_is_nothing_to_tell():
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 100.0}
    note = {"ph": "i", "cat": "note", "name": "note", "ts": 0.0}
    assert temporal_breakdown([operator, note]) is None
    assert temporal_breakdown([]) is None


def test_a_window_of_no_length_has_no_shares():
    assert temporal_breakdown([_kernel(5, 5)]) is None


def test_shares_add_up():
    found = temporal_breakdown([_kernel(0.1, 0.35), _kernel(0.3, 0.7, "Memcpy DtoH", "gpu_memcpy"), _kernel(0.9, 1.0)])
    assert isinstance(found, Breakdown)
    assert found.idle + found.compute + found.other == pytest.approx(1.0, abs=1e-15)
