# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A calculator tool for models that call tools. It evaluates arithmetic and cannot run any other code."""

import ast
import math
import operator
from collections.abc import Callable


_LONGEST_EXPRESSION = 300  # characters
_MAX_BITS = 4_096  # of an integer, about 1,200 digits, so that no call takes long
_LARGEST_FACTORIAL = 400  # its factorial has 2,887 bits

_OPERATORS: dict[type[ast.AST], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_NAMES = {"pi": math.pi, "e": math.e}
_OF_MATH = "sqrt isqrt gcd lcm exp log log2 log10 sin cos tan asin acos atan floor ceil factorial comb perm".split()
_FUNCTIONS: dict[str, Callable] = {name: getattr(math, name) for name in _OF_MATH}
_FUNCTIONS |= {"abs": abs, "min": min, "max": max, "round": round}


def calculate(expression: str) -> str:
    """
    Calculates the value of an arithmetic expression, such as `comb(12, 5) * 3**4 % 7`.

    Args:
        expression: Numbers, the operators + - * / // % **, parentheses, pi, e, and the functions sqrt, isqrt, gcd,
            lcm, exp, log, log2, log10, sin, cos, tan, asin, acos, atan, floor, ceil, factorial, comb, perm, abs, min,
            max and round.

    Returns:
        The value; integers are exact.
    """
    # There is no `Raises` section because models are shown this docstring. All errors are of type `ValueError`, and
    # the model is shown their message.
    if not isinstance(expression, str):
        raise ValueError(f"{expression!r} is not an arithmetic expression.")
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"The expression has {len(expression)} characters, more than {_LONGEST_EXPRESSION}.")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression.") from None
    try:
        return str(_value(tree.body))
    except (ArithmeticError, TypeError) as error:  # division by zero, a float overflow, or unsuitable arguments
        raise ValueError(f"{expression!r} has no value: {error}.") from None


def _value(node: ast.expr) -> int | float:
    """Return the value of a part of an expression. Only the kinds of nodes that are listed here are evaluated."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        value = _NAMES[node.id]
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
            _refuse_above(_MAX_BITS, (left.bit_length() - 1) * abs(right), "the power")
        value = _OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords:
            raise ValueError("Functions take no named arguments.")
        arguments = [_value(argument) for argument in node.args]
        if node.func.id in ("factorial", "comb", "perm"):
            _refuse_above(_LARGEST_FACTORIAL, max(arguments, default=0), f"the argument of {node.func.id}")
        if node.func.id == "round" and len(arguments) == 2:
            # For an integer, `round` computes 10**-digits.
            _refuse_above(_MAX_BITS, abs(arguments[1]), "the digits of round")
        value = _FUNCTIONS[node.func.id](*arguments)
    else:
        raise ValueError(f"`{ast.unparse(node)}` is not arithmetic.")
    if isinstance(value, complex):
        raise ValueError(f"`{ast.unparse(node)}` is not a real number.")
    if isinstance(value, int):
        _refuse_above(_MAX_BITS, value.bit_length(), "the value")
    return value


def _refuse_above(limit: int, size: float, what: str) -> None:
    if size > limit:
        raise ValueError(f"Too large: {what}.")
