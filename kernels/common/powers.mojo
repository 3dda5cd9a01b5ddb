"""Powers of whole numbers."""


@always_inline
def integer_power[
    dtype: DType, width: Int
](base: SIMD[dtype, width], exponent: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """Returns powers, which wrap around. A negative exponent makes zero of all but 1 and -1, as in PyTorch.
    """
    var one = SIMD[dtype, width](1)
    var zero = SIMD[dtype, width](0)
    var result = one
    var factor = base
    var rest = exponent
    comptime if dtype.is_signed():
        rest = exponent.lt(0).select(zero, exponent)
    while rest.ne(0).reduce_or():
        result = (rest & 1).ne(0).select(result * factor, result)
        factor = factor * factor
        rest = rest >> 1
    comptime if dtype.is_signed():
        var sign = (exponent & 1).ne(0).select(-one, one)
        var unit = base.eq(1).select(one, base.eq(-1).select(sign, zero))
        return exponent.lt(0).select(unit, result)
    return result
