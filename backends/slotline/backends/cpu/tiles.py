"""Vector instructions of attention's two products, with one tile of keys and with one tile of values.

They are written in LLVM's language for vectors, since its optimiser makes five times as many of plain loops. Rows are
query heads of one KV head. A block of rows and keys is kept in registers, so that an element of the cache is widened
once for all of them, and sums run across a vector once for four keys.

With *whole numbers* (int8 and four-bit codes, activations of 16 bits), query vectors and weights are rounded to 15 bits
and a sign, and products are added in pairs (`vpdpwssd`, `vpmaddwd`): half as many instructions, and none to widen.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from functools import cache
from typing import Any

from attrs import frozen
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

TILE = 32
"""Keys whose scores are computed before the running maximum is brought up to date once."""
KEYS_AT_ONCE = 4
"""Keys of a block. Offsets are given for a multiple of it."""
MOST_WHOLE = 32767
"""Largest rounded element of a query vector and rounded weight."""
LINE_BYTES = 64
"""Bytes that a processor fetches at once."""
SECOND_CACHE = 2
"""Number of the processor's second cache where lines are fetched ahead: into the first one was slower."""
MOST_SIZE = 512
"""Largest vectors of whole numbers: 512 products of 127 and 32767 are less than 2 ** 31."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1, "int4": 1}
"""Bytes of a stored element by its kind. One of `int4` is two codes plus 8, the even element low."""
UNIT = {"fp8": 256.0}
"""What an element read by `_Code.floats` must be multiplied by, 1 if not named."""

_WORD, _INT, _SHORT, _BYTE = (ir.IntType(bits) for bits in (64, 32, 16, 8))
_FLOAT, _HALF = ir.FloatType(), ir.HalfType()


@frozen
class Machine:
    """What the processor has.

    Attributes:
        lanes: numbers of 32 bits in a vector.
        pairs: the instruction that adds products of pairs, empty if there is none.
        rows: of a block, so that it fits into the registers.
        vectors: of a row's values in a block, likewise.
    """

    lanes: int
    pairs: str
    rows: int
    vectors: int


@cache
def machine() -> Machine:
    """Return what the processor has that numba compiles for."""
    features = set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
    if "+avx512bw" in features:
        return Machine(16, "vpdpwssd.512" if "+avx512vnni" in features else "pmaddw.d.512", 4, 4)
    if "+avx2" in features:
        return Machine(8, "pmadd.wd", 2, 2)
    return Machine(8, "", 2, 2) if "+avx" in features else Machine(4, "", 4 if "+neon" in features else 2, 2)


@frozen
class Form:
    """Form of the products: kind and number of stored elements, and how they are computed.

    Attributes:
        kind: of the elements, a key of `BYTES`.
        size: elements of a vector.
        whole: query vectors and weights are int16, sums int32, both multiplied by a scale afterwards.
    """

    kind: str
    size: int
    whole: bool

    @property
    def coded(self) -> bool:
        """Return True if each vector has a scale, a factor of its scores or weights."""
        return self.kind in ("fp8", "int8", "int4")

    @property
    def streams(self) -> int:
        """Return the number of elements in one stored element."""
        return 2 if self.kind == "int4" else 1


def form(kind: str, size: int, *, short: bool) -> Form:
    """Return the form for vectors of `size` elements. `short` is True if activations have 16 bits."""
    streams = 2 if kind == "int4" else 1
    fits = size <= MOST_SIZE and size % (2 * machine().lanes * streams) == 0
    return Form(kind, size, short and kind in ("int8", "int4") and bool(machine().pairs) and fits)


class _Code:
    """Writer of vector instructions at a builder's place."""

    def __init__(self, builder: Any, made: Form) -> None:
        self.b, self.form, self.lanes = builder, made, machine().lanes
        self.zero = ir.Constant(ir.VectorType(_FLOAT, self.lanes), [0.0] * self.lanes)
        self.none = ir.Constant(ir.VectorType(_INT, self.lanes), [0] * self.lanes)

    def load(self, address: Any, kind: Any, align: int) -> Any:
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=align)

    def at(self, address: Any, index: Any, size: int) -> Any:
        """Return the address of an element of `size` bytes."""
        return self.b.add(address, self.b.mul(index, ir.Constant(_WORD, size)))

    def variable(self, value: Any) -> Any:
        """Return the place of a value that changes, which the compiler keeps in a register."""
        place = cgutils.alloca_once(self.b, value.type)
        self.b.store(value, place)
        return place

    def shuffle(self, a: Any, b: Any, places: list[int]) -> Any:
        return self.b.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, len(places)), places))

    def splat(self, value: Any, lanes: int) -> Any:
        kind = ir.VectorType(value.type, lanes)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_INT, 0))
        return self.shuffle(one, one, [0] * lanes)

    def like(self, value: Any, number: int) -> Any:
        """Return a vector of one whole number, of another vector's type."""
        return ir.Constant(value.type, [number] * value.type.count)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.b.fadd(self.b.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def floats(self, address: Any, width: int) -> list[Any]:
        """Return `width` stored elements as float32, one vector for each of the form's streams."""
        b, kind = self.b, self.form.kind
        wide, float32 = ir.VectorType(_INT, width), ir.VectorType(_FLOAT, width)
        if kind == "float32":
            return [self.load(address, float32, 4)]
        if kind == "float16":
            return [b.fpext(self.load(address, ir.VectorType(_HALF, width), 2), float32)]
        if kind == "bfloat16":
            bits = b.zext(self.load(address, ir.VectorType(_SHORT, width), 2), wide)
            return [b.bitcast(b.shl(bits, self.like(bits, 16)), float32)]
        stored = self.load(address, ir.VectorType(_BYTE, width), 1)
        if kind == "fp8":  # as float16 with the same bits, which is 2 ** 8 times smaller
            bits = b.sext(stored, ir.VectorType(_SHORT, width))
            bits = b.and_(b.shl(bits, self.like(bits, 7)), self.like(bits, 0xBFFF - 0x10000))
            return [b.fpext(b.bitcast(bits, ir.VectorType(_HALF, width)), float32)]
        if kind == "int8":
            return [b.sitofp(b.sext(stored, wide), float32)]
        bits = b.zext(stored, wide)
        codes = b.and_(bits, self.like(bits, 15)), b.lshr(bits, self.like(bits, 4))
        return [b.sitofp(b.sub(code, self.like(code, 8)), float32) for code in codes]

    def shorts(self, stored: Any) -> list[Any]:
        """Return stored bytes as int16, one vector for each of the form's streams."""
        b, parts = self.b, [stored]
        if self.form.kind == "int4":
            codes = b.and_(stored, self.like(stored, 15)), b.lshr(stored, self.like(stored, 4))
            parts = [b.sub(code, self.like(code, 8)) for code in codes]
        return [b.sext(part, ir.VectorType(_SHORT, stored.type.count)) for part in parts]

    def add_pairs(self, total: Any, a: Any, b: Any) -> Any:
        """Return total [lanes] int32 plus the sums of two products each of int16 vectors [2 * lanes]."""
        name = machine().pairs
        kind, shorts = total.type, a.type
        if name.startswith("vpdpwssd"):
            function = self._function(f"llvm.x86.avx512.{name}", kind, [kind, kind, kind])
            return self.b.call(function, [total, self.b.bitcast(a, kind), self.b.bitcast(b, kind)])
        level = "avx512" if name.endswith("512") else "avx2"
        product = self.b.call(self._function(f"llvm.x86.{level}.{name}", kind, [shorts, shorts]), [a, b])
        return self.b.add(total, product)

    def _function(self, name: str, result: Any, arguments: list[Any]) -> Any:
        module = self.b.module
        return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, arguments), name)

    def widened(self, value: Any) -> Any:
        """Return a vector with zeros behind it, as wide as the others."""
        width = value.type.count
        if width == self.lanes:
            return value
        zeros = ir.Constant(value.type, [0.0] * width)
        return self.shuffle(value, zeros, [min(i, width) for i in range(self.lanes)])

    def larger(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def across(self, vectors: list[Any], join: Any) -> Any:
        """Return one number of all elements of some vectors, joined by pairs."""
        while len(vectors) > 1:
            vectors = [join(*vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
        found, width = vectors[0], self.lanes
        while width > 1:
            width //= 2
            found = join(*(self.shuffle(found, found, list(range(at, at + width))) for at in (0, width)))
        return self.b.extract_element(found, ir.Constant(_INT, 0))

    def exp(self, x: Any) -> Any:
        """Return exp of a vector x <= 0, to about one unit in the last place, 0 below -87: as `kernels._exp` does."""
        b, kind = self.b, x.type

        def all_of(number: float) -> Any:
            return ir.Constant(kind, [number] * self.lanes)

        low = all_of(-87.0)
        clamped = self.larger(x, low)
        floor = self._function(f"llvm.floor.v{self.lanes}f32", kind, [kind])
        n = b.call(floor, [self.fma(clamped, all_of(1.44269504088896341), all_of(0.5))])
        r = self.fma(n, all_of(-0.693359375), clamped)
        r = self.fma(n, all_of(2.12194440e-4), r)
        y = all_of(1.9875691500e-4)
        for number in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            y = self.fma(y, r, all_of(number))
        y = b.fadd(self.fma(b.fmul(y, r), r, r), all_of(1.0))
        power = b.shl(b.add(b.fptosi(n, self.none.type), self.like(self.none, 127)), self.like(self.none, 23))
        return b.select(b.fcmp_ordered(">=", x, low), b.fmul(y, b.bitcast(power, kind)), self.zero)

    def sums_of_four(self, totals: list[Any]) -> Any:
        """Return the sums across four vectors of one type, as a vector of four."""
        add = self.b.add if totals[0].type.element == _INT else self.b.fadd

        def fold(a: Any, b: Any, first: list[int], second: list[int]) -> Any:
            halves = [[g + x for g in range(0, self.lanes, 4) for x in part] for part in (first, second)]
            return add(*(self.shuffle(a, b, half) for half in halves))

        w = self.lanes
        front, back = (fold(a, b, [0, w, 1, w + 1], [2, w + 2, 3, w + 3]) for a, b in (totals[:2], totals[2:]))
        found, width = fold(front, back, [0, 1, w, w + 1], [2, 3, w + 2, w + 3]), w
        while width > 4:
            width //= 2
            found = add(*(self.shuffle(found, found, list(range(at, at + width))) for at in (0, width)))
        return found


def _widths(size: int, lanes: int) -> list[tuple[int, int]]:
    """Return the places and widths of what is left of `size` elements behind whole vectors: powers of two."""
    found, at = [], size // lanes * lanes
    while at < size:
        width = 1 << (size - at).bit_length() - 1
        found.append((at, width))
        at += width
    return found


def _scores(made: Form, rows: int) -> Any:
    """Return an intrinsic that writes the scores of `rows` query vectors with four keys.

    Its arguments are addresses: of the first query vector, the first key of the cache, the four offsets, the scores
    [rows, TILE] at the first key, the scales [rows] of whole numbers, and the four factors.
    """

    def write(code: _Code, query: Any, keys: Any, offsets: Any, out: Any, scales: Any, factors: Any) -> None:
        b, lanes, size = code.b, code.lanes, made.size
        element, each = 2 if made.whole else 4, BYTES[made.kind]
        step = 2 * lanes if made.whole else lanes
        stored = size // made.streams + size % made.streams
        read = [code.load(code.at(offsets, ir.Constant(_WORD, k), 8), _WORD, 8) for k in range(KEYS_AT_ONCE)]
        at = [code.at(keys, offset, each) for offset in read]
        empty = code.none if made.whole else code.zero
        sums = [[code.variable(empty) for _ in range(KEYS_AT_ONCE)] for _ in range(rows)]

        def add(index: Any, width: int) -> None:
            places = [code.at(address, index, each) for address in at]
            if made.whole:
                loaded = [code.load(place, ir.VectorType(_BYTE, width), 1) for place in places]
                parts = [code.shorts(one) for one in loaded]
            else:
                parts = [code.floats(place, width) for place in places]
            kind = ir.VectorType(_SHORT if made.whole else _FLOAT, width)
            for row in range(rows):
                for stream in range(made.streams):
                    begin = ir.Constant(_WORD, row * size + stream * stored)
                    vector = code.load(code.at(query, b.add(index, begin), element), kind, element)
                    for k in range(KEYS_AT_ONCE):
                        total = b.load(sums[row][k])
                        if made.whole:
                            total = code.add_pairs(total, parts[k][stream], vector)
                        elif width == lanes:
                            total = code.fma(parts[k][stream], vector, total)
                        else:
                            total = b.fadd(total, code.widened(b.fmul(parts[k][stream], vector)))
                        b.store(total, sums[row][k])

        with cgutils.for_range(b, ir.Constant(_WORD, stored // step)) as loop:
            add(b.mul(loop.index, ir.Constant(_WORD, step)), step)
        for place, width in _widths(stored, step):
            add(ir.Constant(_WORD, place), width)
        four = ir.VectorType(_FLOAT, KEYS_AT_ONCE)
        factor = code.load(factors, four, 4) if made.coded else None
        for row in range(rows):
            found = code.sums_of_four([b.load(place) for place in sums[row]])
            if made.whole:
                found = b.sitofp(found, four)
                scale = code.load(code.at(scales, ir.Constant(_WORD, row), 4), _FLOAT, 4)
                found = b.fmul(found, code.splat(scale, KEYS_AT_ONCE))
            if factor is not None:
                found = b.fmul(found, factor)
            place = code.at(out, ir.Constant(_WORD, row * TILE), 4)
            b.store(found, b.inttoptr(place, found.type.as_pointer()), align=4)

    return _intrinsic(made, write)


def _values(made: Form, rows: int) -> Any:
    """Return an intrinsic that adds the weighted values of some keys to `rows` sums [size].

    Its arguments are addresses: of the weights [rows, TILE], the sums, the first value of the cache, the offsets; then
    the number of keys, a multiple of `KEYS_AT_ONCE`; and the address of the scales [rows, TILE] of whole numbers, the
    first of each row.
    """

    def write(code: _Code, weights: Any, sums: Any, values: Any, offsets: Any, count: Any, scales: Any) -> None:
        b, lanes, size = code.b, code.lanes, made.size
        stored = size // made.streams + size % made.streams
        vectors = 1 if made.streams == 2 else max(1, min(stored // lanes, machine().vectors))

        def add(index: Any, widths: list[int]) -> None:
            """Add to the elements from `index` on."""
            places, totals = [], []
            for row in range(rows):
                for number, width in enumerate(widths):
                    for stream in range(made.streams):
                        begin = ir.Constant(_WORD, row * size + stream * stored + number * lanes)
                        address = code.at(sums, b.add(index, begin), 4)
                        places.append(b.inttoptr(address, ir.VectorType(_FLOAT, width).as_pointer()))
                        totals.append(code.variable(b.load(places[-1], align=4)))
            with cgutils.for_range(b, count) as loop:
                at = b.add(code.load(code.at(offsets, loop.index, 8), _WORD, 8), index)
                parts = []
                for number, width in enumerate(widths):
                    place = code.at(values, b.add(at, ir.Constant(_WORD, number * lanes)), BYTES[made.kind])
                    parts += code.floats(place, width)
                for row in range(rows):
                    place = code.at(weights, b.add(loop.index, ir.Constant(_WORD, row * TILE)), 4)
                    weight = code.load(place, _FLOAT, 4)
                    for part, total in zip(parts, totals[row * len(parts) :], strict=False):
                        b.store(code.fma(part, code.splat(weight, part.type.count), b.load(total)), total)
            for total, place in zip(totals, places, strict=True):
                b.store(b.load(total), place, align=4)

        step = vectors * lanes
        with cgutils.for_range(b, ir.Constant(_WORD, stored // step)) as loop:
            add(b.mul(loop.index, ir.Constant(_WORD, step)), [lanes] * vectors)
        for place, width in _widths(stored, step):
            add(ir.Constant(_WORD, place), [width])

    return _intrinsic(made, write)


def _whole_values(made: Form, rows: int) -> Any:
    """Return the same for weights and sums of whole numbers, where products of two keys are added at once.

    Bytes of two keys are mixed within pieces of 16, which is one instruction, and sums are put in order at the end.
    """

    def write(code: _Code, weights: Any, sums: Any, values: Any, offsets: Any, count: Any, scales: Any) -> None:
        b, lanes = code.b, code.lanes
        step, stored = 2 * lanes, made.size // made.streams
        columns = [[at + x for at in range(8 * half, step, 16) for x in range(8)] for half in (0, 1)]
        order = [(columns[0] + columns[1]).index(column) for column in range(step)]

        with cgutils.for_range(b, ir.Constant(_WORD, stored // step)) as loop:
            index = b.mul(loop.index, ir.Constant(_WORD, step))
            totals = [[code.variable(code.none) for _ in range(2 * made.streams)] for _ in range(rows)]
            with cgutils.for_range(b, b.udiv(count, ir.Constant(_WORD, 2))) as keys:
                j = b.mul(keys.index, ir.Constant(_WORD, 2))
                read = []
                for number in (j, b.add(j, ir.Constant(_WORD, 1))):
                    at = b.add(code.load(code.at(offsets, number, 8), _WORD, 8), index)
                    read.append(code.load(b.add(values, at), ir.VectorType(_BYTE, step), 1))
                mixed = [code.shuffle(read[0], read[1], [x for c in half for x in (c, step + c)]) for half in columns]
                parts = [part for half in mixed for part in code.shorts(half)]  # half by half, then by streams
                for row in range(rows):
                    place = code.at(weights, b.add(j, ir.Constant(_WORD, row * TILE)), 2)
                    pair = b.bitcast(code.splat(code.load(place, _INT, 2), lanes), parts[0].type)
                    for part, total in zip(parts, totals[row], strict=True):
                        b.store(code.add_pairs(b.load(total), part, pair), total)
            for row in range(rows):
                scale = code.load(code.at(scales, ir.Constant(_WORD, row * TILE), 4), _FLOAT, 4)
                for stream in range(made.streams):
                    halves = [b.load(totals[row][half * made.streams + stream]) for half in (0, 1)]
                    for number in (0, 1):
                        found = code.shuffle(halves[0], halves[1], order[number * lanes : (number + 1) * lanes])
                        begin = ir.Constant(_WORD, row * made.size + stream * stored + number * lanes)
                        place = b.inttoptr(code.at(sums, b.add(index, begin), 4), code.zero.type.as_pointer())
                        found = b.sitofp(found, code.zero.type)
                        b.store(code.fma(found, code.splat(scale, lanes), b.load(place, align=4)), place, align=4)

    return _intrinsic(made, write)


def _soften(made: Form) -> Any:
    """Return an intrinsic that turns a row of scores [TILE] into weights, and updates maximum, norm and sums [size].

    Its arguments are addresses: of the scores, maximum, norm, sums, factors [TILE]; and of int16 weights and their
    scale.
    """

    def write(code: _Code, line: Any, top: Any, norm: Any, sums: Any, factors: Any, weights: Any) -> None:
        b, lanes, kind = code.b, code.lanes, code.zero.type
        at = [code.at(line, ir.Constant(_WORD, i), 4) for i in range(0, TILE, lanes)]
        scores = [code.load(place, kind, 4) for place in at]
        before = code.load(top, _FLOAT, 4)
        best = code.across(scores, code.larger)
        with b.if_then(b.fcmp_ordered(">", best, before)):
            b.store(best, b.inttoptr(top, _FLOAT.as_pointer()), align=4)
            shrink = code.exp(code.splat(b.fsub(before, best), lanes))
            place = b.inttoptr(norm, _FLOAT.as_pointer())
            b.store(b.fmul(b.load(place, align=4), b.extract_element(shrink, ir.Constant(_INT, 0))), place, align=4)
            with cgutils.for_range(b, ir.Constant(_WORD, made.size // lanes)) as loop:
                place = b.inttoptr(code.at(sums, loop.index, 4 * lanes), kind.as_pointer())
                b.store(b.fmul(b.load(place, align=4), shrink), place, align=4)
            for index in range(made.size // lanes * lanes, made.size):
                place = b.inttoptr(code.at(sums, ir.Constant(_WORD, index), 4), _FLOAT.as_pointer())
                shrunk = b.fmul(b.load(place, align=4), b.extract_element(shrink, ir.Constant(_INT, 0)))
                b.store(shrunk, place, align=4)
        highest = code.splat(code.larger(best, before), lanes)
        found = [code.exp(b.fsub(score, highest)) for score in scores]
        place = b.inttoptr(norm, _FLOAT.as_pointer())
        b.store(b.fadd(b.load(place, align=4), code.across(found, b.fadd)), place, align=4)
        if made.coded:
            of = [code.load(code.at(factors, ir.Constant(_WORD, i), 4), kind, 4) for i in range(0, TILE, lanes)]
            found = [b.fmul(weight, factor) for weight, factor in zip(found, of, strict=True)]
        if not made.whole:
            for weight, place in zip(found, at, strict=True):
                b.store(weight, b.inttoptr(place, kind.as_pointer()), align=4)
            return
        largest = code.larger(code.across(found, code.larger), ir.Constant(_FLOAT, 1e-30))
        most = ir.Constant(_FLOAT, float(MOST_WHOLE))
        b.store(b.fdiv(largest, most), b.inttoptr(line, _FLOAT.as_pointer()), align=4)
        factor, half = code.splat(b.fdiv(most, largest), lanes), ir.Constant(kind, [0.5] * lanes)
        for i, weight in enumerate(found):
            whole = b.fptosi(code.fma(weight, factor, half), code.none.type)
            whole = b.trunc(whole, ir.VectorType(_SHORT, lanes))
            place = code.at(weights, ir.Constant(_WORD, i * lanes), 2)
            b.store(whole, b.inttoptr(place, whole.type.as_pointer()), align=2)

    return _intrinsic(made, write)


def _fetch(made: Form) -> Any:
    """Return an intrinsic that fetches some vectors into the processor's caches.

    Its arguments are addresses: of the first vector of the cache, and of the `KEYS_AT_ONCE` offsets.
    """

    def write(code: _Code, first: Any, offsets: Any, *_: Any) -> None:
        b = code.b
        byte, name = _BYTE.as_pointer(), "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
        function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
        size = -(-made.size // made.streams) * BYTES[made.kind]
        for key in range(KEYS_AT_ONCE):
            offset = code.load(code.at(offsets, ir.Constant(_WORD, key), 8), _WORD, 8)
            at = code.at(first, offset, BYTES[made.kind])
            for line in range(0, size, LINE_BYTES):
                place = b.inttoptr(b.add(at, ir.Constant(_WORD, line)), byte)
                b.call(function, [place, *(ir.Constant(_INT, n) for n in (0, SECOND_CACHE, 1))])  # to read, of data

    return _intrinsic(made, write)


def _intrinsic(made: Form, write: Any) -> Any:
    """Return an intrinsic without a result that takes six whole numbers of 64 bits and is written by `write`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        write(_Code(builder, made), *args)
        return context.get_dummy_value()

    signature = types.void(*[types.int64] * 6)

    @intrinsic
    def six(typingctx, a, b, c, d, e, f):  # type: ignore[no-untyped-def]
        return signature, codegen

    return six


@cache
def score_tile(made: Form) -> Any:
    """Return the function that writes the scores [num_rows, TILE] of query vectors with `count` keys.

    It takes addresses: of the query vectors [num_rows, size], the first key of the cache, the keys' offsets in
    elements, the scores, the scales [num_rows] of whole numbers, the factors of codes [TILE]; and of the offsets
    [TILE] of keys that come next, which are fetched. Offsets are read, and scores written, up to the next multiple of
    `KEYS_AT_ONCE`.
    """
    most = machine().rows
    each = 2 if made.whole else 4
    row_bytes = made.size * each
    many, three, two, one = (_scores(made, rows) for rows in (most, min(most, 3), 2, 1))
    fetch = _fetch(made)

    @njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    def score(query, keys, offsets, out, scales, factors, count, num_rows, ahead):  # type: ignore[no-untyped-def]
        for j in range(0, TILE, KEYS_AT_ONCE):
            fetch(keys, ahead + j * 8, 0, 0, 0, 0)
            if j >= count:
                continue
            at, to, by = offsets + j * 8, out + j * 4, factors + j * 4
            row = 0
            while row + most <= num_rows:
                many(query + row * row_bytes, keys, at, to + row * TILE * 4, scales + row * 4, by)
                row += most
            if most > 3 and row + 3 == num_rows:
                three(query + row * row_bytes, keys, at, to + row * TILE * 4, scales + row * 4, by)
                row += 3
            if row + 2 <= num_rows:
                two(query + row * row_bytes, keys, at, to + row * TILE * 4, scales + row * 4, by)
                row += 2
            if row < num_rows:
                one(query + row * row_bytes, keys, at, to + row * TILE * 4, scales + row * 4, by)

    return score


@cache
def add_values(made: Form) -> Any:
    """Return the function that adds weights [num_rows, TILE] times values to sums [num_rows, size].

    It takes addresses: of the weights, int16 if whole numbers, the sums, the first value of the cache, the values'
    offsets in elements, the scales [num_rows, TILE] of whole numbers, the first of each row; and of the offsets [TILE]
    of values that come next, which are fetched. Offsets and weights are read up to the next multiple of
    `KEYS_AT_ONCE`.
    """
    most = machine().rows
    each = 2 if made.whole else 4
    row_bytes = made.size * 4
    write = _whole_values if made.whole else _values
    many, three, two, one = (write(made, rows) for rows in (most, min(most, 3), 2, 1))
    fetch = _fetch(made)

    @njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    def add(weights, sums, values, offsets, scales, count, num_rows, ahead):  # type: ignore[no-untyped-def]
        for j in range(0, TILE, KEYS_AT_ONCE):
            fetch(values, ahead + j * 8, 0, 0, 0, 0)
        keys = (count + KEYS_AT_ONCE - 1) // KEYS_AT_ONCE * KEYS_AT_ONCE
        row = 0
        while row + most <= num_rows:
            many(weights + row * TILE * each, sums + row * row_bytes, values, offsets, keys, scales + row * TILE * 4)
            row += most
        if most > 3 and row + 3 == num_rows:
            three(weights + row * TILE * each, sums + row * row_bytes, values, offsets, keys, scales + row * TILE * 4)
            row += 3
        if row + 2 <= num_rows:
            two(weights + row * TILE * each, sums + row * row_bytes, values, offsets, keys, scales + row * TILE * 4)
            row += 2
        if row < num_rows:
            one(weights + row * TILE * each, sums + row * row_bytes, values, offsets, keys, scales + row * TILE * 4)

    return add


@cache
def soften_tile(made: Form) -> Any:
    """Return the function that turns a row of scores [TILE] into weights, and updates its maximum, norm and sums.

    It takes addresses: of the scores, the maximum, the norm, the sums [size], the factors of codes [TILE], and the
    int16 weights of whole numbers, whose scale takes the place of the first score.
    """
    row = _soften(made)

    @njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    def soften(line, top, norm, sums, factors, weights):  # type: ignore[no-untyped-def]
        row(line, top, norm, sums, factors, weights)

    return soften
