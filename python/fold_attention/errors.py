"""Errors of the Python front, in the form the C++ library uses: `what=got; allowed`."""


def bad_value(what: str, got: object, allowed: str) -> ValueError:
    return ValueError(f"{what}={got}; {allowed}")


def bad_type(what: str, got: object, allowed: str) -> TypeError:
    return TypeError(f"{what}={got}; {allowed}")
