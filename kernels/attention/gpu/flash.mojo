"""The calls that tensor cores take, and code that their kernels share."""

from ...common.tensor_cores import pairs_compile
from ..pointers import BackwardPointers, ForwardPointers
from ..problem import AttentionProblem, Strides
from .tiles import PIECE, by_warpgroups


comptime LOG2_E = Float32(1.4426950408889634)
comptime LOG_2 = Float32(0.6931471805599453)


def depth_of[wide: Bool]() -> Int:
    """Columns that a tile has room for."""
    return 128 if wide else 64


@fieldwise_init
struct FlashShape(Equatable, ImplicitlyCopyable, TrivialRegisterPassable):
    """The work of a block: each warp has 16 rows of the results, and the other operand passes by in steps of `step`
    rows."""

    var warps: Int
    var step: Int
    var blocks: Int
    """Blocks on a multiprocessor at once; the registers must suffice for all of them."""
    var ahead: Bool
    """Whether the forward pass forms the next scores while it works on the current ones."""

    def rows(self) -> Int:
        return 16 * self.warps

    def threads(self) -> Int:
        return 32 * self.warps


# Measured on an H200 at 2048 rows and at a vision transformer's 197. A bias takes registers that fewer blocks leave.


def forward_shape[dtype: DType, biased: Bool, wide: Bool]() -> FlashShape:
    comptime if by_warpgroups[dtype]():
        return FlashShape(4, 64, 2, True) if wide else FlashShape(
            8, 64, 1 if biased else 2, True
        )
    else:
        return FlashShape(8, 64, 1 if wide else 2, False)


comptime WINDOW = FlashShape(4, 64, 4, False)
"""The shape of the forward pass with a bias where a head has no more queries than a block: blocks are short, and only
other blocks on the same multiprocessor hide their waits."""


def keys_shape[dtype: DType, biased: Bool, wide: Bool]() -> FlashShape:
    """Returns the shape of the kernel over blocks of keys. Without wgmma, steps are small enough that a wide block fits
    99 KiB of shared memory."""
    comptime if by_warpgroups[dtype]():
        return FlashShape(8, 64, 1, False) if wide else FlashShape(
            4, 64, 2 if biased else 3, False
        )
    else:
        return FlashShape(8, 32 if wide else 64, 1, False)


def queries_shape[dtype: DType, wide: Bool]() -> FlashShape:
    comptime if by_warpgroups[dtype]():
        return FlashShape(4, 64, 2 if wide else 3, False)
    else:
        return FlashShape(8, 32 if wide else 64, 1, False)


@always_inline
def visible(query: Int32, keys: Int32, reach: Int32) -> Int32:
    """Returns how many keys a query sees."""
    return max(Int32(0), min(keys, query + reach))


def _is_aligned(strides: Strides) -> Bool:
    return (strides.batch | strides.head | strides.row) % PIECE == 0


@no_inline
def flash_refusal[
    dtype: DType, wide: Bool
](p: AttentionProblem, addresses: Int) -> Optional[String]:
    """Returns None, or why the kernels do not take the problem; `addresses` are all operands' addresses, joined by
    `or`."""
    comptime if not pairs_compile[dtype]():
        return String(
            "needs tensor cores as in sm_80, and elements of two bytes"
        )
    if p.is_empty() or p.size == 0 or p.value_size == 0:
        return String("a tensor is empty")
    if p.size % PIECE != 0 or p.value_size % PIECE != 0:
        return String(
            t"rows of {p.size} and {p.value_size} elements, not of multiples of"
            t" {PIECE}"
        )
    if max(p.size, p.value_size) > depth_of[wide]():
        return String(t"rows of more than {depth_of[wide]()} elements")
    if (
        not _is_aligned(p.query)
        or not _is_aligned(p.key)
        or not _is_aligned(p.value)
        or not _is_aligned(p.output)
        or not _is_aligned(p.query_grad)
        or not _is_aligned(p.key_grad)
        or not _is_aligned(p.value_grad)
        or addresses % 16 != 0
    ):
        return String("a row does not begin at a multiple of 16 bytes")
    if p.scale <= 0:
        return String("the scale is not positive")
    if p.queries >= 1 << 30 or p.keys >= 1 << 30:
        return String("more than 2^30 queries or keys")
    if p.heads >= 1 << 16 or p.batch >= 1 << 16:
        return String("more than 65535 heads or batches")
    return None


@always_inline
def forward_addresses[
    dtype: DType, bias_type: DType
](at: ForwardPointers[dtype, bias_type]) -> Int:
    return Int(at.output) | Int(at.query) | Int(at.key) | Int(at.value)


@always_inline
def backward_addresses[
    dtype: DType, bias_type: DType
](at: BackwardPointers[dtype, bias_type]) -> Int:
    return (
        Int(at.query_grad)
        | Int(at.key_grad)
        | Int(at.value_grad)
        | Int(at.grad)
        | Int(at.query)
        | Int(at.key)
        | Int(at.value)
        | Int(at.output)
    )
