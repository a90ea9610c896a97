r"""A tool of your own: arithmetic, without a process for each call.

    areal-lite train model=… rollout.workflow=areal_lite.workflows.tools:Tools \
      'rollout.workflow_args={tools: [examples.custom_workflow.calculator:calculator, python]}'

The policy writes the expression, so nothing in it may run code or take long.
"""

import ast
import operator

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_MAX_BITS = 4096
_MAX_CHARACTERS = 1000


def calculator(expression: str) -> str:
    """
    Computes the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / // % **, and parentheses, such as (1 + 2) * 3
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"an expression of more than {_MAX_CHARACTERS} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> int | float:
    """Evaluate a node. Raises OverflowError for an integer of more than _MAX_BITS bits."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.operand))
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                raise OverflowError("the number is too large")
            return value
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int):
        if base.bit_length() * abs(exponent) > _MAX_BITS:
            raise OverflowError("the number is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the root of a negative number")
    return value
