"""Checks of the operands of entries."""


def check_equal(argument: String, value: Int, wanted: Int, rule: String) raises:
    if value != wanted:
        raise Error(argument, "=", value, ": ", rule, " is ", wanted)
