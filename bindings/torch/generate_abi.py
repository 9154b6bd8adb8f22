#!/usr/bin/env python3
"""Writes ctypes declarations of everything in include/kda/*.h. Usage: generate_abi.py HEADER_DIR OUT.py"""

import pathlib
import re
import sys

SCALARS = {
    "int32_t": "c_int32", "int64_t": "c_int64", "uint32_t": "c_uint32", "uint64_t": "c_uint64", "uint8_t": "c_uint8",
    "size_t": "c_size_t", "double": "c_double", "char": "c_char", "int": "c_int",
}  # fmt: skip
# A header comes after those that it includes.
ORDER = ["types", "context", "conv", "prefill", "decode"]


def headers(folder):
    paths = {p.stem: p for p in sorted(pathlib.Path(folder).glob("*.h")) if p.stem != "kda"}
    names = [n for n in ORDER if n in paths] + [n for n in paths if n not in ORDER]
    return "\n".join(re.sub(r"/\*.*?\*/", "", paths[n].read_text(), flags=re.S) for n in names)


class Declarations:
    def __init__(self, text):
        self.constants = [(n, v) for n, v in re.findall(r"^#define (KDA_\w+) +(0x[0-9a-fA-F]+|\d+)u?\s*$", text, re.M)]
        self.enums = {}
        for name, body in re.findall(r"typedef\s+KDA_ENUM\((\w+)\)\s*\{(.*?)\}", text, re.S):
            self.enums[name] = re.findall(r"(KDA_\w+)\s*=\s*(\d+)", body)
        self.callbacks = dict(re.findall(r"typedef\s+\w[\w ]*\(\*(\w+)\)\((.*?)\);", text, re.S))
        self.callback_results = dict((n, r) for r, n in re.findall(r"typedef\s+(\w[\w ]*?)\s*\(\*(\w+)\)\(", text))
        self.structs = {n: b for n, b in re.findall(r"struct\s+(\w+)\s*\{(.*?)\}", text, re.S)}
        self.functions = re.findall(r"KDA_API\s+([\w\s*]+?)\b(kda_\w+)\s*\((.*?)\)\s*;", text, re.S)

    def type(self, text):
        """The ctypes expression of a C type."""
        text = " ".join(text.replace("const", " ").replace("struct ", " ").split())
        base, stars = text.rstrip("* "), text.count("*")
        if base in self.callbacks:
            return base if stars == 0 else "c_void_p"
        if stars == 0:
            if base == "void":
                return "None"
            return "c_int32" if base in self.enums else SCALARS.get(base, base)
        if base == "char":
            inner, stars = "c_char_p", stars - 1
        elif base in self.structs:
            inner = base
        elif base in SCALARS or base in self.enums:
            inner = self.type(base)
        else:  # void or an opaque handle
            inner, stars = "c_void_p", stars - 1
        return "POINTER(" * stars + inner + ")" * stars

    def parameters(self, text):
        if text.strip() in ("", "void"):
            return []
        # A parameter that is itself a function: any pointer does.
        text = re.sub(r"void \(\*\w+\)\([^)]*\)", "void* function", text)
        names = (re.match(r"(.*?[\w*])\s*(?:\*\s*)?$", p.strip(), re.S).group(1) for p in text.split(","))
        return [self.type(re.sub(r"\b\w+$", "", n) if re.search(r"[\s*]\w+$", n) else n) for n in names]

    def fields(self, body):
        body = re.sub(r"\w+ \(\*(\w+)\)\([^)]*\)", r"void* \1", body)
        for declaration in filter(None, (d.strip() for d in body.split(";"))):
            first, *rest = [d.strip() for d in declaration.split(",")]
            match = re.match(r"(.*?[\s*])(\w+)((?:\[\w+\])?)$", first, re.S)
            kind = self.type(match.group(1))
            for name, array in [match.groups()[1:], *(re.match(r"(\w+)((?:\[\w+\])?)$", r).groups() for r in rest)]:
                yield name, kind + (f" * {array[1:-1]}" if array else "")


def write(d):
    yield '"""ctypes declarations of the C ABI, generated from include/kda. Documentation: the headers, docs/abi.md."""'
    yield "# ruff: noqa"
    yield "from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_void_p"
    yield f"from ctypes import {', '.join(sorted(set(SCALARS.values())))}"
    yield ""
    yield from (f"{name} = {value}" for name, value in d.constants)
    for values in d.enums.values():
        yield ""
        yield from (f"{name} = {value}" for name, value in values)
    yield ""
    yield from (f"class {name}(Structure): pass" for name in d.structs)
    yield ""
    for name, parameters in d.callbacks.items():
        types = [d.type(d.callback_results[name]), *d.parameters(parameters)]
        yield f"{name} = CFUNCTYPE({', '.join(types)})"
    yield ""
    for name, body in d.structs.items():
        yield f"{name}._fields_ = ["
        yield from (f'    ("{field}", {kind}),' for field, kind in d.fields(body))
        yield "]"
    yield ""
    yield "# Which enumeration a field holds, for readable values."
    yield "ENUM_FIELDS = {"
    for name, body in d.structs.items():
        for declaration in (x.split() for x in body.split(";") if x.strip()):
            if declaration[0] in d.enums:
                for field in " ".join(declaration[1:]).split(","):
                    yield f'    ("{name}", "{field.strip().split("[")[0]}"): "{declaration[0]}",'
    yield "}"
    yield "ENUMS = {"
    for name, values in d.enums.items():
        yield f'    "{name}": {{{", ".join(f"{v!r}: {n}" for v, n in values)}}},'
    yield "}"
    yield "FUNCTIONS = {"
    for result, name, parameters in d.functions:
        yield f'    "{name}": ({d.type(result)}, [{", ".join(d.parameters(parameters))}]),'
    yield "}"


def main():
    folder, out = sys.argv[1:]
    pathlib.Path(out).write_text("\n".join(write(Declarations(headers(folder)))) + "\n")


main()
