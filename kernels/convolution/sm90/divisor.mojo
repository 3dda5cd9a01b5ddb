"""Quotients by multiplication, for divisors that a launch knows."""


@fieldwise_init
struct Divisor(ImplicitlyCopyable, TrivialRegisterPassable):
    """A divisor of numbers from 0 to 2^31 - 1, and what makes quotients without a division: a block's first copies wait for a
    chain of them."""

    var value: Int32
    var multiplier: UInt32
    """2^shift / value, rounded up; exact for such numbers where 2^(shift - 31) is at least the value."""
    var shift: UInt32

    @staticmethod
    def of(value: Int) -> Self:
        """`value` is from 1 to 2^31 - 1."""
        var log = 0
        while (1 << log) < value:
            log += 1
        var shift = 31 + log
        return Self(
            Int32(value),
            UInt32(((1 << shift) + value - 1) // value),
            UInt32(shift),
        )

    @always_inline
    def divide(self, value: Int32) -> Tuple[Int32, Int32]:
        """Quotient and remainder."""
        var quotient = Int32(
            (UInt64(UInt32(value)) * UInt64(self.multiplier))
            >> UInt64(self.shift)
        )
        return quotient, value - quotient * self.value
