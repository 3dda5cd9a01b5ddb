"""One call of attention: sizes, where operands lie, and what a query sees.

Letters: B batches, H heads of queries, G heads of keys and values (H / G queries' heads share one), M queries, N keys,
D a query's and a key's size, E a value's. With S = scale * Q K^T + bias over one head,

    P = exp(S - logsumexp)      O = P V
    dV = P^T dO                 dS = P * (dO V^T - delta), delta = rowsum(dO * O)
    dQ = scale * dS K           dK = scale * dS^T Q

A row that sees no key, or whose scores are all -inf, has O = 0, logsumexp = 0 and no gradient; as softmax alone defines
it, it is NaN. NaN stays NaN.
"""

from std.utils.index import Index, IndexList

from ..common.argument import KernelArgument

comptime OPERANDS = 4
"""Query, key, value and output, in the order of the rows of `axes`; a gradient's axes are its tensor's."""
comptime STRIDED = 6
"""Query, key and value, then their gradients: they may lie in larger tensors."""


@fieldwise_init
struct Strides(KernelArgument):
    """Elements from one batch, head and row to the next; a row is contiguous.
    """

    var batch: Int
    var head: Int
    var row: Int

    @always_inline
    def offset(self, batch: Int, head: Int) -> Int:
        return batch * self.batch + head * self.head

    @always_inline
    def row_offset(self, batch: Int, head: Int, row: Int) -> Int:
        return self.offset(batch, head) + row * self.row


@fieldwise_init
struct BiasStrides(KernelArgument):
    """Strides of a bias [B, H, M, N]; 0 along axes where it is broadcast."""

    var batches: Int
    """Batches after which the bias repeats."""
    var batch: Int
    var head: Int
    var row: Int
    var key: Int


@fieldwise_init
struct AttentionProblem(KernelArgument):
    """One call."""

    var batch: Int
    var heads: Int
    var groups: Int
    """Heads of keys and values."""
    var queries: Int
    var keys: Int
    var size: Int
    """Elements of a query and of a key."""
    var value_size: Int
    var query: Strides
    var key: Strides
    var value: Strides
    var output: Strides
    var query_grad: Strides
    var key_grad: Strides
    var value_grad: Strides
    var bias: BiasStrides
    var scale: Float64
    var reach: Int
    """Query i sees the keys before i + reach; without a causal mask that is all of them."""
    var hidden_is_nan: Bool
    """Whether a row whose keys are all hidden is NaN, not 0."""

    @always_inline
    def visible(self, query: Int) -> Int:
        """Returns how many keys, from the first on, a query sees."""
        return max(0, min(self.keys, query + self.reach))

    @always_inline
    def first_query(self, key: Int) -> Int:
        """The first query that sees a key."""
        return max(0, key - self.reach + 1)

    @always_inline
    def repeats(self) -> Int:
        """Heads of queries for each head of keys."""
        return self.heads // self.groups

    @always_inline
    def bias_offset(self, batch: Int, head: Int, query: Int) -> Int:
        return (
            batch % self.bias.batches * self.bias.batch
            + head * self.bias.head
            + query * self.bias.row
        )

    @always_inline
    def sums_offset(self, batch: Int, head: Int) -> Int:
        """Returns the offset of a head's logsumexp in [B, H, M]."""
        return (batch * self.heads + head) * self.queries

    def is_empty(self) -> Bool:
        return self.batch * self.heads * self.queries * self.keys == 0


@fieldwise_init
struct StridedHeads(ImplicitlyCopyable, TrivialRegisterPassable):
    """The sizes and the strides of a [batch, heads, rows, columns] tensor."""

    var batch: Int
    var heads: Int
    var rows: Int
    var columns: Int
    var strides: Strides


@no_inline
def strided_heads(
    extents: IndexList[4], axes: IndexList[3]
) raises -> StridedHeads:
    """Returns sizes and strides of a tensor. `axes` says where batch, heads and rows lie among the first three extents
    in memory."""
    var seen = 0
    comptime for i in range(3):
        if axes[i] < 0 or axes[i] > 2:
            raise Error(t"attention: there is no axis {axes[i]}")
        seen |= 1 << axes[i]
    if seen != 7:
        raise Error(t"attention: axes {axes} are no permutation")
    var steps = Index(
        extents[1] * extents[2] * extents[3],
        extents[2] * extents[3],
        extents[3],
    )
    return StridedHeads(
        extents[axes[0]],
        extents[axes[1]],
        extents[axes[2]],
        extents[3],
        Strides(steps[axes[0]], steps[axes[1]], steps[axes[2]]),
    )


@no_inline
def replace_strides(
    mut problem: AttentionProblem, steps: Array[IndexList[3], STRIDED]
) raises:
    """Replaces the strides of tensors that are views of larger ones by `steps` of batch, head and row; a tensor of its
    own has zeros there."""

    def place(mut strides: Strides, own: IndexList[3]) raises:
        if min(own[0], min(own[1], own[2])) < 0:
            raise Error(t"attention: steps {own}: none may be negative")
        if max(own[0], max(own[1], own[2])) > 0:
            strides = Strides(own[0], own[1], own[2])

    place(problem.query, steps[0])
    place(problem.key, steps[1])
    place(problem.value, steps[2])
    place(problem.query_grad, steps[3])
    place(problem.key_grad, steps[4])
    place(problem.value_grad, steps[5])


@no_inline
def _broadcast(
    name: StaticString, extent: Int, size: Int, step: Int
) raises -> Int:
    """The stride of one dimension of the bias."""
    if extent == size:
        return step if size > 1 else 0
    if extent == 1:
        return 0
    raise Error(t"attention: the bias has {extent} {name}, not {size} or 1")


@no_inline
def bias_strides(
    extents: IndexList[4], problem: AttentionProblem
) raises -> BiasStrides:
    """Returns the strides of a contiguous bias that is broadcast over [B, H, M, N], or that has fewer batches and is
    repeated."""
    var batches = max(1, extents[0])
    if problem.batch % batches != 0 or (extents[0] == 0) != (
        problem.batch == 0
    ):
        raise Error(
            t"attention: the bias has {extents[0]} batches, no part of"
            t" {problem.batch}"
        )
    return BiasStrides(
        batches,
        extents[1] * extents[2] * extents[3],
        _broadcast("heads", extents[1], problem.heads, extents[2] * extents[3]),
        _broadcast("queries", extents[2], problem.queries, extents[3]),
        _broadcast("keys", extents[3], problem.keys, 1),
    )


@no_inline
def checked(
    query: StridedHeads,
    key: StridedHeads,
    value: StridedHeads,
    output: StridedHeads,
    sums: IndexList[3],
    scale: Float64,
    is_causal: Bool,
    aligned_at_end: Bool,
    hidden_is_nan: Bool,
) raises -> AttentionProblem:
    """Returns the problem that the operands describe, without a bias.

    A causal mask lets a query see the keys up to its own number, or, if `aligned_at_end`, lets the last query see the
    last key. `hidden_is_nan` says whether a row whose keys are all hidden is NaN.
    """
    if key.batch != query.batch or value.batch != query.batch:
        raise Error(
            t"attention: {query.batch}, {key.batch} and {value.batch} batches"
            t" of queries, keys and values"
        )
    if key.heads != value.heads or key.rows != value.rows:
        raise Error(
            t"attention: {key.heads} heads of {key.rows} keys,"
            t" {value.heads} of {value.rows} values"
        )
    if key.heads == 0 or query.heads % key.heads != 0:
        raise Error(
            t"attention: {query.heads} heads of queries over {key.heads}"
        )
    if key.columns != query.columns:
        raise Error(
            t"attention: queries of {query.columns} elements, keys of"
            t" {key.columns}"
        )
    if (
        output.batch != query.batch
        or output.heads != query.heads
        or output.rows != query.rows
        or output.columns != value.columns
    ):
        raise Error(
            "attention: the output's shape is not the queries' rows of values"
        )
    if (
        sums[0] != query.batch
        or sums[1] != query.heads
        or sums[2] != query.rows
    ):
        raise Error(t"attention: logsumexp is {sums}, not a number for a query")
    var reach = key.rows
    if is_causal:
        reach = 1 + (key.rows - query.rows if aligned_at_end else 0)
    return AttentionProblem(
        batch=query.batch,
        heads=query.heads,
        groups=key.heads,
        queries=query.rows,
        keys=key.rows,
        size=query.columns,
        value_size=value.columns,
        query=query.strides,
        key=key.strides,
        value=value.strides,
        output=output.strides,
        query_grad=query.strides,
        key_grad=key.strides,
        value_grad=value.strides,
        bias=BiasStrides(1, 0, 0, 0, 0),
        scale=scale,
        reach=reach,
        hidden_is_nan=hidden_is_nan,
    )
