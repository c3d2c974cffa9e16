"""Errors of the Python front, in the form the C++ library uses: `what=got; allowed`."""

import operator


def bad_value(what: str, got: object, allowed: str) -> ValueError:
    return ValueError(f"{what}={got}; {allowed}")


def bad_type(what: str, got: object, allowed: str) -> TypeError:
    return TypeError(f"{what}={got}; {allowed}")


def whole(name: str, value: object) -> int:
    """A 64-bit integer argument."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise bad_type(name, type(value).__name__, "allowed: an integer") from None
    if not -(2**63) <= number < 2**63:
        raise bad_value(name, number, "allowed: 64-bit integers")
    return number
