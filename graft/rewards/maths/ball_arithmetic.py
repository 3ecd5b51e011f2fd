"""Arithmetic with numbers that are exact, or known up to an error bound.

    Fraction(1, 3)                a third
    Ball(1.7320508, 4e-16)        the root of 3, give or take 4e-16

Two values that lie further apart than their errors are certainly different. Nothing else can be
concluded: two balls that overlap may still be different numbers.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

MAX_BITS = 1 << 15  # of a numerator or denominator
EPSILON = 2.0**-52


class Unreadable(ValueError):
    """A value or formula that this module does not handle."""


class Ball(NamedTuple):
    """A number known up to an error: the true one lies within mid - err .. mid + err."""

    mid: float
    err: float


Value = Fraction | Ball


def differ(a: Value, b: Value, tolerance: float = 0.0) -> bool:
    """True if two values are certainly not the same one."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return abs(a - b) > tolerance
    first, second = as_ball(a), as_ball(b)
    return abs(first.mid - second.mid) > 4 * (first.err + second.err) + tolerance


def as_ball(value: Value) -> Ball:
    if isinstance(value, Ball):
        return value
    try:
        mid = float(value)
    except OverflowError:
        raise Unreadable("too large") from None
    return _ball(mid, abs(mid) * EPSILON)


def _ball(mid: float, err: float) -> Ball:
    if not math.isfinite(mid + err):
        raise Unreadable("too large")
    return Ball(mid, err + abs(mid) * EPSILON + 1e-300)


def exact(value: Fraction) -> Fraction:
    if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise Unreadable("too large")
    return value


def add(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return exact(a + b)
    a, b = as_ball(a), as_ball(b)
    return _ball(a.mid + b.mid, a.err + b.err)


def negate(a: Value) -> Value:
    return -a if isinstance(a, Fraction) else Ball(-a.mid, a.err)


def multiply(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return exact(a * b)
    a, b = as_ball(a), as_ball(b)
    return _ball(a.mid * b.mid, abs(a.mid) * b.err + abs(b.mid) * a.err + a.err * b.err)


def divide(a: Value, b: Value) -> Value:
    if isinstance(b, Fraction):
        if b == 0:
            raise Unreadable("division by zero")
        return multiply(a, 1 / b)
    if abs(b.mid) <= 2 * b.err:
        raise Unreadable("division by what may be zero")
    a = as_ball(a)
    mid = a.mid / b.mid
    return _ball(mid, (a.err + abs(mid) * b.err) / (abs(b.mid) - b.err))


def root(a: Value, degree: int) -> Value:
    """The positive root of a positive number: exact where it is a fraction."""
    if isinstance(a, Fraction):
        if a < 0:
            raise Unreadable("root of a negative number")
        if a.numerator.bit_length() + a.denominator.bit_length() < 100:
            roots = [round(part ** (1 / degree)) for part in (a.numerator, a.denominator)]
            if roots[0] ** degree == a.numerator and roots[1] ** degree == a.denominator:
                return Fraction(roots[0], roots[1])
    ball = as_ball(a)
    if ball.mid <= 4 * ball.err:
        raise Unreadable("root of what may be negative")
    mid = ball.mid ** (1 / degree)
    return _ball(mid, mid * (ball.err / (ball.mid - ball.err) + 4 * EPSILON))


def power(a: Value, exponent: Value) -> Value:
    """Whole exponents, and 1/2."""
    if not isinstance(exponent, Fraction):
        raise Unreadable("not a whole exponent")
    if exponent == Fraction(1, 2):
        return root(a, 2)
    if exponent.denominator != 1 or abs(exponent) > 10_000:
        raise Unreadable("not a small whole exponent")
    times = abs(int(exponent))
    if times == 0 and a == 0:
        raise Unreadable("0^0")
    if isinstance(a, Fraction):
        bits = max(abs(a.numerator).bit_length(), a.denominator.bit_length())
        if bits * times > MAX_BITS:
            raise Unreadable("too large")
        result: Value = a**times
    else:
        if times > 64:
            raise Unreadable("too large")
        result = Fraction(1)
        for _ in range(times):
            result = multiply(result, a)
    return divide(Fraction(1), result) if exponent < 0 else result
