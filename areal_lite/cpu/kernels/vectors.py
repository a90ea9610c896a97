"""Vectors of 16 float32 numbers, and a softmax, for kernels that numba compiles.

numba turns a loop into vector instructions only if it is long, and heads of 32 or 64 elements are
short. Kernels of attention therefore load, compute and store 16 numbers at once. A processor
without such wide registers uses two or four of its own.

numba's cache looks at the time of a kernel's own file. After a change of this one, delete
areal_lite/cpu/kernels/__pycache__.
"""

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic

SIZE = 16
"""Numbers of a vector."""
_FLOATS = ir.VectorType(ir.FloatType(), SIZE)
_FAST = ("fast",)


class _VectorType(types.Type):
    """The type of a vector of SIZE float32 numbers in numba."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


Vector = _VectorType()


@register_default(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, frontend_type) -> None:
        super().__init__(manager, frontend_type, _FLOATS)


@intrinsic
def zeros(_typing):
    """Return a vector of zeros."""
    return Vector(), lambda *_: ir.Constant(_FLOATS, [0.0] * SIZE)


@intrinsic
def load(_typing, array, first):
    """Return SIZE elements of a flat array, or of a row, as float32, from `first` on.

    An array of uint16 has the bits of bfloat16 numbers: the upper halves of float32 numbers.
    """

    def generate(context, builder, signature, args):
        if signature.args[0].dtype == types.float32:
            return builder.load(_pointer(context, builder, signature, args, _FLOATS), align=4)
        halves = _pointer(context, builder, signature, args, ir.VectorType(ir.IntType(16), SIZE))
        bits = ir.VectorType(ir.IntType(32), SIZE)
        wide = builder.zext(builder.load(halves, align=2), bits)
        return builder.bitcast(builder.shl(wide, ir.Constant(bits, [16] * SIZE)), _FLOATS)

    return Vector(array, types.intp), generate


@intrinsic
def store(_typing, array, first, vector):
    """Write a vector to a flat array, or a row, of float32, from `first` on."""

    def generate(context, builder, signature, args):
        builder.store(args[2], _pointer(context, builder, signature, args, _FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, Vector), generate


@intrinsic
def multiply_add(_typing, number, vector, total):
    """Return number · vector + total."""

    def generate(_context, builder, _signature, args):
        number, vector, total = args
        zero = ir.Constant(ir.IntType(32), 0)
        nothing = ir.Constant(_FLOATS, ir.Undefined)
        same = ir.Constant(ir.VectorType(ir.IntType(32), SIZE), [0] * SIZE)
        first = builder.insert_element(nothing, number, zero)
        product = builder.fmul(builder.shuffle_vector(first, nothing, same), vector, flags=_FAST)
        return builder.fadd(product, total, flags=_FAST)

    return Vector(types.float32, Vector, Vector), generate


@intrinsic
def add(_typing, a, b):
    """Return a + b."""
    return Vector(Vector, Vector), lambda _context, builder, _signature, args: builder.fadd(*args)


@intrinsic
def prefetch(_typing, array, offset):
    """Ask for the cache line of element `offset` of a flat array."""

    def generate(context, builder, signature, args):
        byte_pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
        pointer = _pointer(context, builder, signature, args, ir.IntType(8))
        read, keep, of_data = (ir.Constant(flag, value) for value in (0, 3, 1))
        builder.call(function, [pointer, read, keep, of_data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _pointer(context, builder, signature, args, target: ir.Type) -> ir.Value:
    """Return the address of element args[1] of the array args[0], as a pointer to `target`."""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), target.as_pointer())


@numba.njit(inline="always", fastmath=True)
def exp(x):
    """Return exp(x) of float32 x <= 0, to 1.2e-7 of its value; exp(-87) below -87.

    numba calls the C library once for each number. This takes a twentieth of its time, because the
    compiler turns loops of it into vector instructions. With n the integer nearest to x / ln 2,
    exp(x) = 2^n exp(x - n ln 2). The polynomial and ln 2 in two parts are those of the Cephes
    library's expf.
    """
    x = max(x, np.float32(-87.0))
    n = np.int32(x * np.float32(1.44269504) - np.float32(0.5))
    r = x - np.float32(n) * np.float32(0.693359375)
    r = r + np.float32(n) * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return np.int32((n + np.int32(127)) * np.int32(1 << 23)).view(np.float32) * p


@numba.njit(nogil=True, fastmath=True)
def softmax(scores, scale):
    """Replace scores, float32 [n], by softmax(scale · scores). Return log Σ exp(scale · scores).

    scale is above 0.
    """
    highest = scores[0]
    for i in range(1, len(scores)):
        highest = max(highest, scores[i])
    total = np.float32(0)
    for i in range(len(scores)):
        scores[i] = exp(scale * (scores[i] - highest))
        total += scores[i]
    factor = np.float32(1) / total
    for i in range(len(scores)):
        scores[i] *= factor
    return scale * highest + np.log(total)
