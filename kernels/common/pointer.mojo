"""Pointers to the elements of tensors, and the type that sums of them are kept in."""

from max.gpu.host import DeviceBuffer
from max.gpu.memory import AddressSpace

comptime Ptr[dtype: DType] = MutPointer[Scalar[dtype], MutUntrackedOrigin]
"""A tensor's elements, of a CPU's memory or a GPU's."""

comptime Shared[dtype: DType] = MutPointer[
    Scalar[dtype], MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""Elements in a block's shared memory."""

comptime accumulation_type[
    dtype: DType
]: DType = DType.float64 if dtype == DType.float64 else DType.float32
"""The type in which sums and maxima are kept."""


def device_pointer[dtype: DType](buffer: DeviceBuffer[dtype]) -> Ptr[dtype]:
    return Ptr[dtype](unsafe_from_address=Int(buffer.unsafe_ptr()))
