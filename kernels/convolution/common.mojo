"""Types and small helpers that every convolution kernel shares."""

from max.gpu.host import DeviceBuffer

from ..parallel import worker_count

comptime Ptr[dtype: DType] = MutPointer[Scalar[dtype], MutUntrackedOrigin]

# The three passes; the value is a compile-time parameter of shared kernels.
comptime FPROP = 0
comptime DGRAD = 1
comptime WGRAD = 2

# The groups that a library function serves, a compile-time parameter too. Kernels for depthwise problems, which have
# entries of their own, are compiled for ANY_GROUPS alone.
comptime ONE_GROUP = 0
comptime WIDE_GROUPS = 1
comptime ANY_GROUPS = 2

comptime accumulation_type[
    dtype: DType
]: DType = DType.float64 if dtype == DType.float64 else DType.float32


def device_pointer[dtype: DType](buffer: DeviceBuffer[dtype]) -> Ptr[dtype]:
    return Ptr[dtype](unsafe_from_address=Int(buffer.unsafe_ptr()))
