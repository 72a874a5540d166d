"""What a ``torch.save`` pickle describes, without unpickling it.

A pickle is a program for a small stack machine. This one runs only the instructions ``torch.save`` writes, builds plain dicts, lists
and descriptions of tensors, and calls nothing: a name it does not know is collected, never imported. So a checkpoint is listed
in milliseconds, without torch and without a data byte. What is honest but beyond it (quantised or sparse tensors, DTensor) becomes an
``Opaque``, about which the caller asks torch (``weights_only``, meta device). The instructions follow ``torch/_weights_only_unpickler.py``.
"""

from __future__ import annotations

from typing import IO, Any, NamedTuple

from eagle3diag.checkpoint.dtypes import FROM_TORCH

__all__ = ["Damaged", "Foreign", "Opaque", "Storage", "Strided", "interpret"]

_MAX_STEPS = 20_000_000
_MAX_STRING = 1 << 20
_STORAGES = {
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}
_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_parameter_with_state")
# roots under which torch's own allow-list has names; anything else is foreign whatever torch is installed
_ROOTS = ("torch", "collections", "_codecs", "builtins", "__builtin__")
_HARMLESS_BUILTINS = ("bytearray", "set", "complex")


class Damaged(Exception):
    """Not a pickle that ``torch.save`` can have written."""


class Foreign(Exception):
    """Names that would have to be imported; ``args[0]`` is a tuple of ``module.name``."""


class Storage(NamedTuple):
    """A run of elements that tensors are views of: ``key`` names its record, ``dtype`` is torch's spelling."""

    key: str
    dtype: str
    numel: int


class Strided(NamedTuple):
    """A view of a storage: element ``offset``, ``shape`` and ``stride`` in elements of ``dtype`` (safetensors spelling)."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Name(NamedTuple):
    module: str
    name: str


class Opaque:
    """A value this machine does not look into; ``needs`` is torch's name for it where it may be a tensor of a rarer kind."""

    __slots__ = ("needs",)

    def __init__(self, needs: str = "") -> None:
        self.needs = needs


_MARK = object()


class _Source:
    """The byte source of ``pickletools.genops``, with no read larger than a string can honestly be."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def read(self, n: int) -> bytes:
        if n > _MAX_STRING:
            raise Damaged(f"a text of {n:,} bytes, at most {_MAX_STRING:,} are read")
        return self._raw.read(n)

    def readline(self) -> bytes:
        return self._raw.readline(4096)

    def tell(self) -> int:
        return self._raw.tell()


def interpret(raw: IO[bytes]) -> Any:
    """The value one pickle describes: plain containers, scalars and ``Strided``; ``raw`` is left after its end.

    Raises:
        Foreign: it names things outside tensors and plain containers.
        Damaged: it is no such pickle.
    """
    import pickletools

    machine = _Machine()
    try:
        for steps, (op, arg, _) in enumerate(pickletools.genops(_Source(raw))):  # type: ignore[arg-type]
            if steps > _MAX_STEPS:
                raise Damaged(f"more than {_MAX_STEPS:,} instructions")
            if op.name == "STOP":
                break
            machine.step(op.name, arg)
        value = machine.stack.pop()
    except Damaged:
        if machine.foreign:  # the likelier reason for strange instructions
            raise Foreign(tuple(machine.foreign)) from None
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError, MemoryError, RecursionError):
        if machine.foreign:
            raise Foreign(tuple(machine.foreign)) from None
        raise Damaged("the pickle is cut or damaged") from None
    if machine.foreign:
        raise Foreign(tuple(machine.foreign))
    return value


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.foreign: dict[str, None] = {}

    def step(self, op: str, arg: Any) -> None:
        stack = self.stack
        if op in _PUSH_ARG:
            stack.append(arg)
        elif op in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[arg] = stack[-1]
        elif op == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[arg])
        elif op in _PUSH_CONSTANT:
            stack.append(_PUSH_CONSTANT[op])
        elif op in _PUSH_NEW:
            stack.append(_PUSH_NEW[op]())
        elif op == "MARK":
            stack.append(_MARK)
        elif op == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif op in _TUPLES:
            n = _TUPLES[op]
            stack[-n:] = [tuple(stack[-n:])]
        elif op == "LIST":
            stack.append(self._to_mark())
        elif op == "DICT":
            filled: dict[Any, Any] = {}
            _set(filled, self._to_mark())
            stack.append(filled)
        elif op == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _set(stack[-1], [key, value])
        elif op == "SETITEMS":
            items = self._to_mark()
            _set(stack[-1], items)
        elif op in ("APPEND", "APPENDS"):
            items = self._to_mark() if op == "APPENDS" else [stack.pop()]
            if isinstance(stack[-1], list):
                stack[-1].extend(items)
        elif op == "ADDITEMS":
            self._to_mark()
        elif op == "GLOBAL":
            stack.append(self._name(*str(arg).split(" ", 1)))
        elif op == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(self._name(str(module), str(name)))
        elif op == "REDUCE":
            args, function = stack.pop(), stack.pop()
            stack.append(self._call(function, args))
        elif op in ("NEWOBJ", "NEWOBJ_EX"):
            at = -3 if op == "NEWOBJ_EX" else -2
            made = stack[at]
            needs = made.needs if isinstance(made, Opaque) else ".".join(made) if isinstance(made, _Name) and made not in _INERT else ""
            stack[at:] = [Opaque(needs)]
        elif op == "BUILD":
            stack.pop()  # attributes of a value (``_metadata`` of a state dict): no weights
        elif op == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif op == "POP":
            stack.pop()
        elif op not in ("PROTO", "FRAME"):
            raise Damaged(f"instruction {op}, which torch.save never writes")

    def _to_mark(self) -> list[Any]:
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def _name(self, module: str, name: str) -> _Name:
        root = module.partition(".")[0]
        if root not in _ROOTS or (root in ("builtins", "__builtin__") and name not in _HARMLESS_BUILTINS):
            self.foreign[f"{module}.{name}"] = None
        return _Name(module, name)

    def _call(self, function: Any, args: Any) -> Any:
        if not isinstance(function, _Name) or not isinstance(args, tuple):
            raise TypeError
        module, name = function
        if module == "collections" and name in ("OrderedDict", "defaultdict", "Counter"):
            found: dict[Any, Any] = {}
            for pair in args[0] if args and isinstance(args[0], list) else ():
                _set(found, list(pair))
            return found
        if module == "torch._utils" and name in _REBUILD:
            if name.startswith("_rebuild_parameter"):
                return args[0]
            return args[0] if isinstance(args[0], Opaque) else _strided(args, name)
        if module == "torch._tensor" and name == "_rebuild_from_type_v2":
            return self._call(args[0], args[2])
        if (module, name) == ("torch", "Size"):
            return tuple(args[0])
        return Opaque("" if (module, name) in _INERT else f"{module}.{name}")


_INERT = {
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("_codecs", "encode"),
    ("builtins", "bytearray"),
    ("builtins", "set"),
    ("builtins", "complex"),
    ("__builtin__", "bytearray"),
    ("__builtin__", "set"),
    ("__builtin__", "complex"),
}
_PUSH_ARG = frozenset(
    (
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG"),
        *("BINFLOAT", "FLOAT", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    )
)
_PUSH_CONSTANT: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_PUSH_NEW: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": Opaque}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _set(into: Any, items: list[Any]) -> None:
    # a nested tuple as key would be hashed again at every level, exponentially; no weight has one
    if isinstance(into, dict):
        into.update((k, v) for k, v in zip(items[::2], items[1::2], strict=True) if isinstance(k, (str, int, float, type(None))))


def _storage(pid: Any) -> Storage | Opaque:
    """A persistent id: ``('storage', type, key, location, numel[, view])`` (``torch/serialization.py``, ``persistent_id``)."""
    if pid[0] == "module":  # a pickled module's class with its source, written before torch 1.6
        return Opaque(".".join(pid[1]))
    kind, of, key, _, numel = pid[:5]
    if kind != "storage" or not isinstance(of, _Name) or type(numel) is not int or not 0 <= numel < 1 << 62:
        raise ValueError
    if len(pid) > 5 and pid[5] is not None:  # a view of another storage, written before torch 0.4
        return Opaque("a storage view")
    return Storage(str(key), _STORAGES.get(of.name, of.name), numel)


def _strided(args: tuple[Any, ...], name: str) -> Strided:
    storage, offset, shape, stride = args[:4]
    if not isinstance(storage, Storage):
        raise TypeError
    dtype = args[6].name if name == "_rebuild_tensor_v3" else storage.dtype
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError
    return Strided(storage, FROM_TORCH.get(dtype, dtype), offset, tuple(shape), tuple(stride))
