#!/usr/bin/env python3
"""Checks what libkda exports against what its headers declare, and writes a C program that uses all of it.

exports.py HEADER_DIR generate OUT.c   a C11 program that takes the address of every declared function
exports.py HEADER_DIR calls OUT.inc    KDA_CALL(name) for every declared function
exports.py HEADER_DIR compare LIB.so   exit 1 unless the library exports exactly the declared functions
"""
import pathlib
import re
import subprocess
import sys


def declared(header_dir):
    names = set()
    for header in sorted(pathlib.Path(header_dir).glob("*.h")):
        text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
        names.update(re.findall(r"KDA_API[^;(]*?\b(kda_\w+)\s*\(", text))
    return sorted(names)


def generate(names, out):
    lines = ["#include <kda/kda.h>", "#include <stdio.h>", "", "typedef void (*function)(void);", "", "int main(void) {"]
    lines.append("  const function functions[] = {")
    lines += [f"      (function){name}," for name in names]
    lines += ["  };", "  unsigned present = 0;",
              "  for (unsigned i = 0; i < sizeof functions / sizeof *functions; ++i) present += functions[i] != 0;",
              f'  printf("%u of {len(names)} functions, version %s\\n", present, kda_version_string());',
              f"  return present == {len(names)} ? 0 : 1;", "}", ""]
    pathlib.Path(out).write_text("\n".join(lines))


def compare(names, library):
    listing = subprocess.run(["nm", "-D", "--defined-only", "--format=posix", library], check=True,
                             capture_output=True, text=True).stdout
    exported = {line.split()[0].split("@")[0] for line in listing.splitlines() if line.split()[1] in "TWBDRVuGS"}
    wrong = [f"exported but not declared: {n}" for n in sorted(exported - set(names))]
    wrong += [f"declared but not exported: {n}" for n in sorted(set(names) - exported)]
    print("\n".join(wrong) or f"{len(names)} functions, exactly as declared")
    return 1 if wrong else 0


def main():
    header_dir, verb, path = sys.argv[1:]
    names = declared(header_dir)
    if not names:
        print(f"no KDA_API function found in {header_dir}")
        return 1
    if verb == "generate":
        return generate(names, path)
    if verb == "calls":
        pathlib.Path(path).write_text("".join(f"KDA_CALL({name})\n" for name in names))
        return 0
    return compare(names, path)


sys.exit(main())
