"""Calls from a graph's ops to kernels that were compiled before the graph.

MAX compiles an op's code anew for every graph and every static shape. Kernels depend on neither, so each is compiled
once for a machine, into a shared library, and the op in the graph is thin: it hands over its operands as 64-bit words
and calls a C function by name. `Call` is the graph's side, `Arguments` the library's; both are compiled from these
sources, so that they agree. What an entry takes is declared in `torch_max_backend/mojo_ops`, from which the ops are
written: its numbers, then its results and operands, each an address followed by extents.
"""

from std.collections import Array
from std.ffi import OwnedDLHandle, _Global
from std.math import align_up
from std.sys.info import size_of
from std.utils.index import IndexList

from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host.device_context import _DeviceContextCpp, _DeviceContextPtr

comptime MAX_WORDS = 128
"""Most words of a call."""
comptime MESSAGE_BYTES = 1024
"""Bytes of the room for an error's message, with its closing zero."""

comptime Function = def(Int, Int, Int) thin abi("C") -> Int
"""A library's function. It takes the addresses of the words, of the device context and of the room for a message, and
returns 0, or 1 after an error."""


# The graph's side.


@fieldwise_init
struct _Address(Copyable, Movable):
    var value: Int


def _look_up[function: StaticString]() -> _Address:
    """Returns the function among the process's global symbols; 0 where no library has brought it.
    """
    try:
        var process = OwnedDLHandle()
        var symbol = process.get_symbol[NoneType](function)
        if symbol:
            return _Address(Int(symbol.value()))
    except:
        pass
    return _Address(0)


comptime Loader = def(Int, Int) thin abi("C") -> Int
"""A function that takes another one's name, as address and length in bytes, and returns that one's address when its
library has been loaded, else 0."""


def _no_loader() -> _Address:
    return _Address(0)


comptime LOADER = _Global["torch_max_loader", _no_loader]
"""The loader of the launch list that runs now. There is one for the process, whatever library asks."""


@no_inline
def _brought(function: StaticString) -> Int:
    """Returns the address of a function that the launch list had not expected to need; 0 where nobody can load it.
    """
    try:
        var address = LOADER.get_or_create_ptr()[].value
        if address != 0:
            return Pointer(to=address).unsafe_bitcast[Loader]()[](
                Int(function.unsafe_ptr()), function.byte_length()
            )
    except:
        pass
    return 0


struct Call[most_words: Int = MAX_WORDS]:
    """The operands of one call, in the order in which the function takes them.
    """

    var _words: Array[Int, Self.most_words]
    var _count: Int

    def __init__(out self):
        self._words = Array[Int, Self.most_words](fill=0)
        self._count = 0

    @always_inline
    def append_word(mut self, word: Int):
        self._words[self._count] = word
        self._count += 1

    def append_words[count: Int](mut self, words: IndexList[count]):
        comptime for i in range(count):
            self.append_word(words[i])

    def append_float(mut self, number: Float64):
        """Appends the bits of a floating-point number."""
        var value = number
        self.append_word(Pointer(to=value).unsafe_bitcast[Int]()[])

    @always_inline
    def append[
        dtype: DType, rank: Int
    ](mut self, tensor: InputTensor[dtype=dtype, rank=rank, ...]):
        self.append_word(Int(tensor.unsafe_ptr()))
        comptime for axis in range(rank):
            self.append_word(tensor.dim_size(axis))

    @always_inline
    def append[
        dtype: DType, rank: Int
    ](mut self, tensor: OutputTensor[dtype=dtype, rank=rank, ...]):
        self.append_word(Int(tensor.unsafe_ptr()))
        comptime for axis in range(rank):
            self.append_word(tensor.dim_size(axis))

    def append_numbers(
        mut self,
        numbers: InputTensor[dtype=DType.int64, rank=1, ...],
        count: Int,
        *,
        listed: Bool,
    ) raises:
        """Appends `count` numbers and, where others are `listed`, how many these are, and these.
        """
        var length = numbers.dim_size(0)
        var wanted = count
        if listed and length > count:
            wanted += 1 + Int(numbers[count])
        if length != wanted or length > Self.most_words // 2:
            raise Error(t"{length} numbers are given: must be {wanted}")
        for i in range(length):
            self.append_word(Int(numbers[i]))

    def append_at[rank: Int](mut self, address: Int, extents: IndexList[rank]):
        """Appends a contiguous tensor that is not an operand of the op."""
        self.append_word(address)
        comptime for axis in range(rank):
            self.append_word(extents[axis])

    @no_inline
    def run[function: StaticString](self, ctx: DeviceContext) raises:
        """Calls the function and raises its error.

        Looking a symbol up takes microseconds, so it is done once.
        """
        comptime entry = _Global[function, _look_up[function]]
        ref found = entry.get_or_create_ptr()[]
        if found.value == 0:
            found.value = _brought(function)
        var address = found.value
        if address == 0:
            raise Error(t"the library of {function} has not been loaded")
        var message = Array[UInt8, MESSAGE_BYTES](fill=0)
        var callee = Pointer(to=address).unsafe_bitcast[Function]()[]
        var failed = callee(
            Int(self._words.unsafe_ptr()),
            handle_of(ctx),
            Int(message.unsafe_ptr()),
        )
        if failed != 0:
            raise Error(String(unsafe_from_utf8_ptr=message.unsafe_ptr()))


@always_inline
def handle_of(ctx: DeviceContext) -> Int:
    return Int(ctx._handle.value())


# The library's side.


@fieldwise_init
struct ScratchMemory(Copyable, Movable):
    """Memory of a device that a launch list lends to one launch after the other.

    On a device's queue a launch begins when the one before has ended, so all of them may use the same memory for what
    they keep between their kernels.
    """

    var base: Int
    """Address of the memory, 0 where there is none."""
    var size: Int
    var used: Int
    """Bytes that this launch has taken so far, or would have."""


def _no_scratch_memory() -> ScratchMemory:
    return ScratchMemory(0, 0, 0)


comptime SCRATCH_MEMORY = _Global[
    "torch_max_scratch_memory", _no_scratch_memory
]
"""Scratch memory of the current launch list. There is one for the process, whatever library asks."""

comptime _SCRATCH_ALIGNMENT = 256
"""Alignment in bytes, that of device allocators."""


def scratch[
    dtype: DType
](ctx: DeviceContext, count: Int) raises -> DeviceBuffer[dtype]:
    """Returns memory on the device for `count` elements until the launch's last kernel has run: lent by the launch list
    where it has enough, else of the device's allocator."""
    ref memory = SCRATCH_MEMORY.get_or_create_ptr()[]
    var begin = memory.used
    var bytes = count * size_of[Scalar[dtype]]()
    memory.used += align_up(bytes, _SCRATCH_ALIGNMENT)
    if memory.base == 0 or memory.used > memory.size:
        return ctx.enqueue_create_buffer[dtype](count)
    var data = MutPointer[Scalar[dtype], MutUntrackedOrigin](
        unsafe_from_address=memory.base + begin
    )
    return DeviceBuffer[dtype](ctx, data, count, owning=False)


struct Operand[dtype: DType, rank: Int](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """A contiguous tensor that the graph keeps alive for the length of the call.
    """

    var data: MutPointer[Scalar[Self.dtype], MutUntrackedOrigin]
    var extents: IndexList[Self.rank]

    @always_inline
    def __init__(
        out self,
        data: MutPointer[Scalar[Self.dtype], MutUntrackedOrigin],
        extents: IndexList[Self.rank],
    ):
        self.data = data
        self.extents = extents

    @always_inline
    def unsafe_ptr(
        self,
    ) -> MutPointer[Scalar[Self.dtype], MutUntrackedOrigin]:
        return self.data

    @always_inline
    def shape(self) -> IndexList[Self.rank]:
        return self.extents

    @always_inline
    def dim_size(self, axis: Int) -> Int:
        return self.extents[axis]

    @always_inline
    def __getitem__(self, index: Int) -> Scalar[Self.dtype]:
        """Returns the element `index` of a tensor in the host's memory."""
        return self.data[unsafe_offset=index]

    def to_device_buffer(self, ctx: DeviceContext) -> DeviceBuffer[Self.dtype]:
        return DeviceBuffer[Self.dtype](
            ctx, self.data, self.extents.flattened_length(), owning=False
        )


struct Arguments:
    """The operands of a call, taken in the order in which it appended them."""

    var _words: MutPointer[Int, MutUntrackedOrigin]
    var _taken: Int

    def __init__(out self, address: Int):
        self._words = {unsafe_from_address = address}
        self._taken = 0

    def take_word(mut self) -> Int:
        var word = self._words[unsafe_offset=self._taken]
        self._taken += 1
        return word

    def take_float(mut self) -> Float64:
        """Takes a floating-point number, whose bits a word holds."""
        var word = self.take_word()
        return Pointer(to=word).unsafe_bitcast[Float64]()[]

    def take_words[count: Int](mut self) -> IndexList[count]:
        var words = IndexList[count]()
        comptime for i in range(count):
            words[i] = self.take_word()
        return words

    def take_list(mut self) -> Operand[DType.int64, 1]:
        """Takes a list of numbers, preceded by their count; they stay where they are.
        """
        var count = self.take_word()
        var first = Operand[DType.int64, 1](
            {unsafe_from_address = Int(self._words.unsafe_offset(self._taken))},
            IndexList[1](count),
        )
        self._taken += count
        return first

    def take[dtype: DType, rank: Int](mut self) -> Operand[dtype, rank]:
        var data = MutPointer[Scalar[dtype], MutUntrackedOrigin](
            unsafe_from_address=self.take_word()
        )
        var extents = IndexList[rank]()
        comptime for axis in range(rank):
            extents[axis] = self.take_word()
        return Operand[dtype, rank](data, extents)


def serve[
    body: def(mut Arguments, DeviceContext) thin raises -> None
](words: Int, context: Int, message: Int) -> Int:
    """Runs one entry; a library's exported functions consist of this call."""
    var arguments = Arguments(words)
    var ctx = DeviceContext(
        _DeviceContextPtr[mut=True](
            MutPointer[_DeviceContextCpp, MutUntrackedOrigin](
                unsafe_from_address=context
            )
        )
    )
    try:
        body(arguments, ctx)
        return 0
    except error:
        _tell(error, message)
        return 1


@no_inline
def _tell(error: Error, message: Int):
    """Writes the error's text, cut to the room that there is."""
    var text = String(error)
    var length = min(text.byte_length(), MESSAGE_BYTES - 1)
    var room = MutPointer[UInt8, MutUntrackedOrigin](
        unsafe_from_address=message
    )
    for i in range(length):
        room[unsafe_offset=i] = text.unsafe_ptr()[unsafe_offset=i]
    room[unsafe_offset=length] = 0
