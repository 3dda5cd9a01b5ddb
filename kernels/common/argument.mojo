"""Types of kernel arguments other than pointers and numbers."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder


trait KernelArgument(DevicePassable, TrivialRegisterPassable):
    """A structure that a kernel takes as it lies in the host's memory."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "KernelArgument"
