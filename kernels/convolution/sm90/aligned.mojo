"""Problems whose channels do not fill the tiles and 16-byte rows of the matrix products, as ones whose channels do.

Three ways, alone or together:

- **Padding** fills channels up to a multiple of 8, of 4 in float32.
- **Folding** takes one row of filter taps as channels, in fprop and wgrad: with C padded to 4 or 8 and the width's
  padding written out, the S taps of a filter row are S * C contiguous elements, and the next window begins `stride`
  pixels later. A tensor map takes such overlapping windows as pixels of S * C channels, which leaves a filter of R x 1
  taps.
- **Blocks** of B neighbouring result pixels of a row are one pixel with B * K filters, whose windows are those of all
  B: (B - 1) * stride + S taps, each filter in its place between zeros. Memory holds the result in this order already.
  Rows of the products, each of which the copy engine brings for every tap, are B times fewer. wgrad makes the
  gradients of all B filters, in float32, and adds them up. A row of a block's pixels may fill whole 16-byte rows where
  one pixel's channels do not: under a 1x1 filter a folded block is read, and written, where it lies.

A filter's zeros meet pixels that are not in its window: where one of those is infinite or NaN, so is the sum.
"""

from std.math import ceildiv, gcd
from std.sys import size_of

from ..passes import DGRAD, FPROP, WGRAD
from ..problem import ConvolutionProblem
from .copies import AS_GIVEN, AlignedTensor, Extents3, Placement
from .exchanged import can_exchange, exchanged, exchanged_pass
from .plan import fprop_phase, stage_length
from .tensor_map import SourceView

comptime MAX_TRAVERSAL_STRIDE = 8
"""Most pixels that the copy engine steps over along an axis."""


comptime _MOST_FOLDED = 4
"""Pixels of a block whose row of taps is folded."""
comptime _MOST_FOLDED_CHANNELS = 1024
"""Of a block that is folded where it lies."""
comptime _FLOPS_PER_COPY = 768
"""Operations of products that take as long as an element of a copy, read or written."""
comptime _MOST_COLUMNS = 128
"""Of a block that is not folded: the wider tiles are slower by what they save."""
comptime _MOST_TAPS = 64
"""Of a row of a block: far less than the copy engine's offsets reach."""
comptime _FULL = 64
"""Columns of the least tile in fprop, rows and panels of wgrad's."""


def _up(value: Int, to: Int) -> Int:
    return ceildiv(value, to) * to


@fieldwise_init
struct Recast(Equatable, ImplicitlyCopyable):
    """The ways beside padding in which a problem is taken as another one."""

    var block: Int
    """B, 1 for none."""
    var folds: Bool
    var exchanges: Bool
    """Whether the problem is the one of exchanged.mojo first."""

    def once_exchanged(self) -> Self:
        return Self(self.block, self.folds, False)


comptime AS_IT_IS = Recast(1, False, False)


@fieldwise_init
struct AlignedProblem(ImplicitlyCopyable):
    """The problem that the kernels run instead, and its tensors."""

    var problem: ConvolutionProblem
    var block: Int
    """Result pixels of the user's problem that are one of this one's."""
    var view: SourceView
    """View through which x, or its copy, is read."""
    var x: AlignedTensor
    var w: AlignedTensor
    var y: AlignedTensor

    def bytes(self) -> Int:
        """Returns the bytes of scratch memory for the copies."""
        return self.x.bytes() + self.w.bytes() + self.y.bytes()


def _lies_folded[dtype: DType](p: ConvolutionProblem, block: Int) -> Bool:
    """Returns whether a block's window is its own pixels, in whole 16-byte rows.
    """
    comptime vector = 16 // size_of[dtype]()
    var is_own = p.s == 1 and p.stride_w == 1 and p.pad_w == 0
    var row = block * p.c
    return is_own and row % vector == 0 and 2 * row >= stage_length[dtype]()


def _in_one_row(p: ConvolutionProblem) -> ConvolutionProblem:
    """Returns a product without windows with all pixels of an image in one row, other problems as they are.
    """
    var strides = max(p.stride_d, p.stride_h, p.stride_w)
    if p.taps() > 1 or strides > 1 or max(p.pad_d, p.pad_h, p.pad_w) > 0:
        return p
    var row = p
    row.d = 1
    row.h = 1
    row.w = p.d * p.h * p.w
    row.o = 1
    row.p = 1
    row.q = row.w
    return row


def _folded[dtype: DType](p: ConvolutionProblem, block: Int) -> Int:
    """Returns the channels of a pixel whose row of taps is folded: windows must begin at multiples of 16 bytes.
    """
    comptime vector = 16 // size_of[dtype]()
    if _lies_folded[dtype](p, block):
        return p.c
    var few = p.c <= 4 and 4 * block * p.stride_w % vector == 0
    return 4 if few else _up(p.c, vector)


def _window(p: ConvolutionProblem, block: Int) -> Int:
    """Returns the taps of a row of filters for a block of pixels."""
    return (block - 1) * p.stride_w + p.s


def depth_of[dtype: DType](p: ConvolutionProblem, recast: Recast) -> Int:
    """Returns the channels that fprop sums a tap over, without what is zero in a block's filters.
    """
    if recast.folds:
        return p.s * _folded[dtype](p, recast.block)
    return _up(p.c, 16 // size_of[dtype]())


def _row[dtype: DType](p: ConvolutionProblem, block: Int) -> Int:
    """Returns the channels that a window's folded row makes."""
    return _window(p, block) * _folded[dtype](p, block)


def takes[
    dtype: DType, pass_: Int
](p: ConvolutionProblem, recast: Recast) -> Bool:
    """Returns whether a problem can be taken so."""
    if recast.block == 1 and not recast.folds:
        return True
    if pass_ == DGRAD or p.dilation_w != 1:
        return False
    if recast.folds and _lies_folded[dtype](p, recast.block):
        var divides = _in_one_row(p).q % recast.block == 0
        return divides and recast.block * p.c <= _MOST_FOLDED_CHANNELS
    if p.q % recast.block != 0 or _window(p, recast.block) > _MOST_TAPS:
        return False
    if recast.folds:
        return _row[dtype](p, recast.block) <= 2 * stage_length[dtype]()
    return recast.block * p.stride_w <= MAX_TRAVERSAL_STRIDE


def _best_block[
    dtype: DType, pass_: Int
](p: ConvolutionProblem, most: Int, most_columns: Int, longest: Int = 0) -> Int:
    """Returns the largest block up to `most` whose result has `most_columns` columns at most, 0 where there is none.
    With `longest` its rows of taps are folded, to so many channels at most.

    Blocks whose columns fill 16-byte rows come before others: the result needs no copy then.
    """
    comptime vector = 16 // size_of[dtype]()
    var folds = longest > 0
    for whole in range(1, -1, -1):
        for block in range(most, 0, -1):
            var columns = block * p.k
            if (
                (whole == 0 or columns % vector == 0)
                and (columns <= most_columns or block == 1)
                and takes[dtype, pass_](p, Recast(block, folds, False))
                and (not folds or _row[dtype](p, block) <= longest)
            ):
                return block
    return 0


def _block_in_place[dtype: DType](p: ConvolutionProblem) -> Int:
    """Returns the block whose window is read where it lies in the least time, 1 if that is none: copies of rows that
    are not whole take time, and products with zeros do."""
    comptime vector = 16 // size_of[dtype]()
    var best = 1
    var least = Int.MAX
    for log in range(4):
        var block = 1 << log
        var row = block * p.c
        var result = block * p.k
        var copied = 0
        if row % vector != 0:
            copied += row + _up(row, vector)
        if result % vector != 0:
            copied += result + _up(result, vector)
        var time = _FLOPS_PER_COPY * copied // block
        time += 2 * p.taps() * row * p.k
        var is_whole = row >= stage_length[dtype]() and takes[dtype, FPROP](
            p, Recast(block, True, False)
        )
        if time < least and (
            block == 1 or is_whole and _lies_folded[dtype](p, block)
        ):
            least = time
            best = block
    return best


def _ways_of[
    dtype: DType, pass_: Int
](p: ConvolutionProblem, most_columns: Int) -> Recast:
    """Returns how fprop and wgrad take a problem without exchanging it, as measured on an H200
    (convolution_few_channels_h200_*.json), with `most_columns` of a result of blocks at most.
    """
    comptime vector = 16 // size_of[dtype]()
    comptime stage = stage_length[dtype]()
    if p.groups > 1:
        return AS_IT_IS
    var in_place = _block_in_place[dtype](p)
    if in_place > 1 and in_place * p.k <= most_columns:
        return Recast(in_place, True, False)
    var is_padded = p.c % vector != 0
    # In one stage or two: of very few channels, and in wgrad, whose panels are whole stages, where blocks save taps.
    for stages in range(1, 3):
        var share = 2 * stages if p.s > 1 else 4
        comptime if pass_ == WGRAD:
            if p.s > 1 and p.stride_w == 1:
                share = 2
        if share * p.c > stage and not is_padded:
            break
        var block = _best_block[dtype, pass_](
            p, _MOST_FOLDED, most_columns, longest=stages * stage
        )
        # Rows of x that are as long as they are in memory need no copy.
        var is_exact = block * p.c % (stage // 2) == 0
        if block > 0 and (p.s > 1 or is_padded or is_exact):
            return Recast(block, True, False)
    if p.stride_w > 1:
        return AS_IT_IS
    var most = MAX_TRAVERSAL_STRIDE
    var columns = _MOST_COLUMNS
    if p.s == 1:
        # Alone to spare a copy of the result.
        if p.k % vector == 0:
            return AS_IT_IS
        comptime if pass_ == FPROP:
            # As few taps more as do.
            most = 2
            while most * p.k % vector != 0:
                most += 1
            columns = 2 * _MOST_COLUMNS
    else:
        # Full columns of fprop, and full tiles of wgrad, gain little or nothing.
        var is_full = p.k >= _FULL
        comptime if pass_ == FPROP:
            # Nor do half of them where copies serve several taps: 48 > 48 channels take 0.4 of the time.
            is_full = is_full or (
                2 * p.k >= _FULL
                and 2 * p.c > _FULL
                and Bool(fprop_phase(p).sharing_taps(p, p.stride_w))
            )
        comptime if pass_ == WGRAD:
            is_full = 2 * p.k > _FULL and p.c > _FULL
        if is_full:
            return AS_IT_IS
    var block = _best_block[dtype, pass_](p, most, min(most_columns, columns))
    return Recast(max(block, 1), False, False)


def recast_of[
    dtype: DType, pass_: Int
](
    p: ConvolutionProblem,
    may_exchange: Bool = True,
    most_columns: Int = Int.MAX,
) -> Recast:
    """Returns how a problem is taken, with `most_columns` of a result of blocks at most.
    """
    var recast = AS_IT_IS
    comptime if pass_ != DGRAD:
        recast = _ways_of[dtype, pass_](p, most_columns)
    comptime if pass_ != FPROP:
        var lies = pass_ == DGRAD and _block_in_place[dtype](exchanged(p)) > 1
        if may_exchange and can_exchange(p) and (p.s > 1 or lies):
            var other = _ways_of[dtype, exchanged_pass[pass_]()](
                exchanged(p), most_columns
            )
            comptime if pass_ == DGRAD:
                other.exchanges = other != AS_IT_IS
            else:
                # Few filters leave most of each tile empty.
                var very_few = other.folds and 4 * p.k <= stage_length[dtype]()
                var half = 2 * p.k > _FULL and p.k <= _FULL and p.c > _FULL
                other.exchanges = p.k < p.c and (very_few or half)
            if other.exchanges:
                recast = other
    return recast if _suits[dtype, pass_](p, recast) else AS_IT_IS


def _suits[
    dtype: DType, pass_: Int
](p: ConvolutionProblem, recast: Recast) -> Bool:
    """Returns whether there is memory for the copies, and the copy engine takes the geometry.
    """
    comptime if pass_ != FPROP:
        if recast.exchanges:
            return _suits[dtype, exchanged_pass[pass_]()](
                exchanged_beside_filter[dtype](p), recast.once_exchanged()
            )
    var aligned = aligned_problem[dtype, pass_](p, recast)
    var phase = fprop_phase(aligned.problem)
    return aligned.bytes() <= p.workspace_limit and phase.fits_copy_engine(
        p.is_deep()
    )


def filter_bytes[dtype: DType](p: ConvolutionProblem) -> Int:
    return p.w_size() * size_of[dtype]()


def exchanged_beside_filter[
    dtype: DType
](p: ConvolutionProblem) -> ConvolutionProblem:
    """Returns the exchanged problem; its workspace has no room for the filter, which is copied.
    """
    var other = exchanged(p)
    other.workspace_limit -= filter_bytes[dtype](p)
    return other


def aligned_problem[
    dtype: DType, pass_: Int
](problem: ConvolutionProblem, recast: Recast) -> AlignedProblem:
    """Returns what the kernels run for a problem that is taken so, or, where that cannot be, padded.
    """
    comptime element = size_of[dtype]()
    comptime vector = 16 // element
    var way = recast if takes[dtype, pass_](problem, recast) else AS_IT_IS
    var block = way.block
    var lies = way.folds and _lies_folded[dtype](problem, block)
    var p = _in_one_row(problem) if lies else problem
    var taps = _window(p, block)
    var c = _up(p.c, vector)
    var k = _up(block * p.k, vector)
    var inner = p
    inner.k = k
    inner.c = c
    inner.q = p.q // block
    inner.s = taps
    inner.stride_w = p.stride_w * block
    var x = AlignedTensor(
        Extents3(p.input_pixels(), 1, c),
        Extents3(p.input_pixels(), 1, p.c),
        AS_GIVEN,
        element,
    )
    var view = SourceView.dense(inner)
    if way.folds:
        c = _folded[dtype](p, block)
        # Whole stages, in fprop also halves: to fill the rest of one with zeros takes the copy engine two to four times
        # as long. A window's row goes on over pixels behind it instead, with zeros in the filter.
        comptime whole = stage_length[dtype]() // (2 if pass_ == FPROP else 1)
        if not lies:
            taps = _up(taps * c, whole) // c
        # Up to the end of the last window, in rows that are a multiple of 16 bytes.
        var width = (
            _up(((inner.q - 1) * inner.stride_w + taps) * c, vector) // c
        )
        view = SourceView.of_rows(
            channels=taps * c,
            pixel=inner.stride_w * c,
            row=width * c,
            h=p.h,
            d=p.d,
        )
        x = AlignedTensor(
            Extents3(p.n * p.d * p.h, width, c),
            Extents3(p.n * p.d * p.h, p.w, p.c),
            Placement(1, p.pad_w, 0),
            element,
        )
        inner.c = taps * c
        inner.w = inner.q
        inner.s = 1
        inner.stride_w = 1
        inner.pad_w = 0
    var planes = p.t * p.r
    return AlignedProblem(
        problem=inner,
        block=block,
        view=view,
        x=x,
        w=AlignedTensor(
            Extents3(k * planes, taps, c),
            Extents3(p.k * planes, p.s, p.c),
            Placement(block, 0, p.stride_w),
            4 if pass_ == WGRAD and block > 1 else element,
        ),
        y=AlignedTensor(
            Extents3(inner.output_pixels(), 1, k),
            Extents3(inner.output_pixels(), 1, block * p.k),
            AS_GIVEN,
            element,
        ),
    )
