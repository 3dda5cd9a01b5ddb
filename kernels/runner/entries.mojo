"""The launch list's entry in a library: calls functions of libraries one after the other.

`code` holds for each call the function's address, where it reports an index outside its dimension (0 for nowhere), the
number of its words, and the words. Addresses that differ from one run to the next are filled in first: `relocations`
has for each of them its place in `code`, the number of its base in `bases`, and how far behind that base it lies.
`scratch` is memory on the device for one launch after the other, as address and bytes; `needed` receives how many bytes
would have been enough. `host` holds `Team`'s two fields, on whose threads kernels on a CPU run, a `Loader`, and the
address of the word that says that something was reported (common/bounds.mojo).
"""

from std.collections import Array

from max.gpu.host import DeviceContext

from ..common.bounds import BOUNDS, Bounds
from ..common.library import (
    LOADER,
    MESSAGE_BYTES,
    SCRATCH_MEMORY,
    Arguments,
    Function,
    Operand,
    ScratchMemory,
    handle_of,
)
from ..common.parallel import TEAM, Team

comptime RELOCATION_WORDS = 3
"""Words of a relocation: the place of an address in the code, the number of its base, and the offset from that base."""
comptime HEAD_WORDS = 3
"""Words before the arguments of a call: its function, the record for its reports, and the number of words that
follow."""


def walk[
    target: StaticString
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Runs the list; ends at the first call that fails, with its message."""
    var code = arguments.take[DType.int64, 1]()
    var relocations = arguments.take[DType.int64, 1]()
    var bases = arguments.take[DType.int64, 1]()
    var scratch = arguments.take[DType.uint8, 1]()
    var needed = arguments.take[DType.int64, 1]()
    var host = arguments.take[DType.int64, 1]()
    for number in range(relocations.dim_size(0) // RELOCATION_WORDS):
        var first = number * RELOCATION_WORDS
        code.data[unsafe_offset=Int(relocations[first])] = (
            bases[Int(relocations[first + 1])] + relocations[first + 2]
        )
    ref memory = SCRATCH_MEMORY.get_or_create_ptr()[]
    memory.base = Int(scratch.data)
    memory.size = scratch.dim_size(0)
    ref team = TEAM.get_or_create_ptr()[]
    team = Team(Int(host[0]), Int(host[1]))
    ref loader = LOADER.get_or_create_ptr()[]
    loader.value = Int(host[2])
    var bounds = BOUNDS.get_or_create_ptr()
    bounds[].found = Int(host[3])
    try:
        needed.data[unsafe_offset=0] = Int64(_launched(code, memory, ctx))
    finally:
        memory.base = 0
        team.start = 0
        loader.value = 0
        bounds[] = Bounds(0, 0)


def _launched(
    code: Operand[DType.int64, 1],
    mut memory: ScratchMemory,
    ctx: DeviceContext,
) raises -> Int:
    """Runs the calls; the most bytes of scratch memory that one of them asked for.
    """
    var most = 0
    var bounds = BOUNDS.get_or_create_ptr()
    var message = Array[UInt8, MESSAGE_BYTES](fill=0)
    var place = 0
    while place < code.dim_size(0):
        memory.used = 0
        var address = Int(code[place])
        var words = place + HEAD_WORDS
        bounds[].record = Int(code[place + 1])
        var callee = Pointer(to=address).unsafe_bitcast[Function]()[]
        var failed = callee(
            Int(code.data.unsafe_offset(words)),
            handle_of(ctx),
            Int(message.unsafe_ptr()),
        )
        if failed != 0:
            raise Error(String(unsafe_from_utf8_ptr=message.unsafe_ptr()))
        most = max(most, memory.used)
        place = words + Int(code[place + 2])
    return most
