#!/usr/bin/env python3
"""Reads ELF files for what cmake/hardening.cmake asks of them. Usage: hardening.py FILE... (one or more of a build)

Exit code 1: something is missing, a line a fault. The symbols are those that the flags leave behind: what fails when a
canary was overwritten, a checked copy, the standard library's own assertion.
"""
import pathlib
import re
import struct
import subprocess
import sys

X86_64 = 62
ENDBR64 = b"\xf3\x0f\x1e\xfa"


def readelf(path, *options):
    return subprocess.run(["readelf", "-W", *options, path], check=True, capture_output=True, text=True).stdout


def file_offset(raw, address):
    """Of an address in a loaded segment of a 64-bit little-endian file."""
    table, = struct.unpack_from("<Q", raw, 32)
    size, count = struct.unpack_from("<HH", raw, 54)
    for i in range(count):
        kind, _, offset, start, _, length = struct.unpack_from("<IIQQQQ", raw, table + i * size)
        if kind == 1 and start <= address < start + length:
            return offset + address - start
    raise ValueError(f"address {address:#x} in no segment")


def faults(path):
    raw = pathlib.Path(path).read_bytes()
    segments, dynamic, symbols = readelf(path, "-l"), readelf(path, "-d"), readelf(path, "--dyn-syms")
    stack = re.search(r"GNU_STACK.*\s([RWE]{2,3})\s", segments)
    if not stack or "E" in stack.group(1):
        yield "the stack may be executed"
    if re.search(r"^\s*LOAD\s.*\sRWE\s", segments, re.M):
        yield "a segment may be written and executed"
    if "GNU_RELRO" not in segments:
        yield "no segment that becomes read-only after relocation (relro)"
    if not re.search(r"\(BIND_NOW\)|\(FLAGS_1\).*NOW|\(FLAGS\).*BIND_NOW", dynamic):
        yield "functions are bound late (now)"
    if "TEXTREL" in dynamic:
        yield "relocations in code"
    kind, machine = struct.unpack_from("<HH", raw, 16)
    if kind != 3 or ("INTERP" in segments and not re.search(r"\(FLAGS_1\).*PIE", dynamic)):
        yield "code that depends on its position"
    for pattern, flag in [(r"\b__stack_chk_fail\b", "-fstack-protector-strong"), (r"\b__\w+_chk\b(?<!__stack_chk_fail)", "_FORTIFY_SOURCE"),
                          (r"__glibcxx_assert_fail", "_GLIBCXX_ASSERTIONS")]:
        if not re.search(pattern, symbols):
            yield f"no trace of {flag}"
    functions = re.findall(r"^\s*\d+: ([0-9a-f]+)\s+\d+ FUNC\s+GLOBAL DEFAULT\s+\d+ (kda_\w+)", symbols, re.M)
    for address, name in functions if machine == X86_64 else []:
        at = file_offset(raw, int(address, 16))
        if raw[at:at + 4] != ENDBR64:
            yield f"{name} has no landing pad (-fcf-protection)"
            break


found = [f"{path}: {fault}" for path in sys.argv[1:] for fault in faults(path)]
print("\n".join(found) or f"{len(sys.argv) - 1} files hold what they should")
sys.exit(1 if found or len(sys.argv) < 2 else 0)
