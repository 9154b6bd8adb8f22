"""Fills the C ABI's structs from keywords: enumerators by name, dtypes by name, tensors by anything with __dlpack__."""

from __future__ import annotations

import ctypes
from typing import Any

from libkda import _abi
from libkda.tensors import dtype_code, view


def enumerator(kind: str, value: Any, where: str) -> int:
    """The number of an enumerator given as such or by the last words of its name ("softplus", "batch_invariant")."""
    if isinstance(value, int):
        return value
    if kind == "kda_dtype":
        return dtype_code(value, where)
    names = {name.removeprefix("KDA_").lower(): number for name, number in _abi.ENUMS[kind].items()}
    short = {name.split("_", 1)[1]: number for name, number in names.items() if "_" in name}
    text = str(value).lower()
    number = names.get(text, short.get(text))
    if number is None:
        raise ValueError(f"{where}: wanted one of {', '.join(short or names)}, got {value!r}")
    return number


def route(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Moves each keyword that is not a field of `kind` to the first nested struct that has it, so that callers need not
    know the nesting: num_heads goes to attention, cu_seqlens to sequences."""
    own = {name for name, _ in kind._fields_}
    out = {name: value for name, value in values.items() if name in own}
    rest = {name: value for name, value in values.items() if name not in own}
    for name, nested in kind._fields_:
        if rest and isinstance(nested, type) and issubclass(nested, ctypes.Structure) and nested is not _abi.kda_tensor:
            known = field_names(nested) & rest.keys()
            if known:
                inner = {key: rest.pop(key) for key in known}
                out[name] = {**route(nested, inner), **out.get(name, {})}
    return {**out, **rest}


def field_names(kind: Any) -> set[str]:
    """Names of a struct's fields and of those of the structs inside it."""
    names: set[str] = set()
    for name, nested in kind._fields_:
        names.add(name)
        if isinstance(nested, type) and issubclass(nested, ctypes.Structure) and nested is not _abi.kda_tensor:
            names |= field_names(nested)
    return names


def fill(struct: Any, values: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Sets the fields named in `values`; a nested struct takes a dict, an array a sequence. None leaves a field absent.

    Returns the struct and what must stay alive while it is used. TypeError for an unknown field, with the known ones.
    """
    keep: list[Any] = []
    fields = dict((name, kind) for name, kind in type(struct)._fields_)
    for name, value in values.items():
        if name not in fields or name == "struct_size":
            known = ", ".join(sorted(field_names(type(struct)) - {"struct_size"}))
            raise TypeError(f"{type(struct).__name__} has no field {name!r}; it has {known}")
        if value is None:
            continue
        kind = fields[name]
        if kind is _abi.kda_tensor:
            tensor = view(value, name)
            keep.append(tensor)
            setattr(struct, name, tensor.c)
        elif isinstance(kind, type) and issubclass(kind, ctypes.Array):
            for i, element in enumerate(value):
                if kind._type_ is _abi.kda_tensor:
                    tensor = view(element, f"{name}[{i}]")
                    keep.append(tensor)
                    getattr(struct, name)[i] = tensor.c
                else:
                    getattr(struct, name)[i] = element
        elif isinstance(kind, type) and issubclass(kind, ctypes.Structure):
            keep += fill(getattr(struct, name), value)[1]
        elif kind is ctypes.c_char_p:
            text = str(value).encode()
            keep.append(text)
            setattr(struct, name, text)
        elif (type(struct).__name__, name) in _abi.ENUM_FIELDS:
            enum = _abi.ENUM_FIELDS[type(struct).__name__, name]
            setattr(struct, name, enumerator(enum, value, name))
        else:
            setattr(struct, name, value)
    return struct, keep
