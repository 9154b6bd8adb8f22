#!/usr/bin/env python3
"""Lists the device code embedded in libraries or object files and fails unless all of it is machine code (spec Y-19).

embedded_code.py FILE...   reads the fat binaries of section .nv_fatbin; no CUDA tool is needed
"""
import struct
import sys

CONTAINER, PTX, MACHINE = 0xBA55ED50, 1, 2


def section(data, wanted):
    """Bytes of one section of a 64-bit little-endian ELF file, or nothing."""
    table, = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    base = headers[names][4]
    for header in headers:
        start = base + header[0]
        if data[start:data.index(b"\0", start)] == wanted:
            return data[header[4]:header[4] + header[5]]
    return b""


def entries(fatbin):
    """(kind, compute capability) of every piece of code: containers of entries, each with its own header."""
    at = 0
    while at + 16 <= len(fatbin):
        magic, _, header, body = struct.unpack_from("<IHHQ", fatbin, at)
        if magic != CONTAINER:  # padding between containers
            at += 8
            continue
        entry, end = at + header, at + header + body
        while entry < end:
            kind, _, length, payload = struct.unpack_from("<HHIQ", fatbin, entry)
            yield kind, struct.unpack_from("<I", fatbin, entry + 28)[0]
            entry += length + payload
        at = end


def main(paths):
    found = []
    for path in paths:
        with open(path, "rb") as file:
            found += entries(section(file.read(), b".nv_fatbin"))
    ptx = [arch for kind, arch in found if kind == PTX]
    other = sorted({kind for kind, _ in found} - {PTX, MACHINE})
    print(f"{len(found)} images: {len(found) - len(ptx)} of machine code for {sorted({a for k, a in found if k == MACHINE})},"
          f" {len(ptx)} of PTX")
    if ptx or other or not found:
        print("wanted machine code and nothing else")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
