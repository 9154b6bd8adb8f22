#!/usr/bin/env python3
"""The HTML report in a browser: what it says, that it is drawn, on a wide screen and on a phone, by day and in the dark.
Usage: report_page_test.py KDA DATA_DIR CHROMIUM"""
import html.parser
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib

KDA, DATA, CHROMIUM = (pathlib.Path(a).resolve() for a in sys.argv[1:4]) if len(sys.argv) > 3 else (None, None, None)
# A width as the frame of another page gives it: windows have a least width, frames have none.
PHONE = """<body style="margin:0"><iframe src="{page}" style="width:390px;height:1600px;border:0"></iframe>
<script>onload = () => {{ const d = frames[0].document.documentElement;
  document.title = "width " + d.scrollWidth + " of " + d.clientWidth; }}</script>"""


def pixels(path):
    """Rows of an 8-bit RGB or RGBA PNG without interlace, and the bytes of a pixel."""
    data, at, width, size, body = path.read_bytes(), 8, 0, 0, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        if kind == b"IHDR":
            width, _, bits, colour = struct.unpack(">IIBB", data[at + 8:at + 18])
            assert bits == 8 and colour in (2, 6)
            size = 3 if colour == 2 else 4
        if kind == b"IDAT":
            body += data[at + 8:at + 8 + length]
        at += 12 + length
    raw, stride = zlib.decompress(body), width * size
    rows, before = [], bytearray(stride)
    for start in range(0, len(raw), stride + 1):
        row = bytearray(raw[start + 1:start + 1 + stride])
        for i in range(stride) if raw[start] else ():
            a, b, c = (row[i - size] if i >= size else 0), before[i], (before[i - size] if i >= size else 0)
            if raw[start] == 4:
                p = a + b - c
                guess = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
            else:
                guess = (0, a, b, (a + b) // 2)[raw[start]]
            row[i] = (row[i] + guess) & 255
        rows.append(row)
        before = row
    return rows, size


class Outline(html.parser.HTMLParser):
    """Tags must nest; nothing may be fetched or run."""

    def __init__(self):
        super().__init__()
        self.open, self.faults, self.words = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "link", "img", "iframe") or any(k in ("src", "href") or k.startswith("on") for k, _ in attributes):
            self.faults.append(tag)
        if tag not in ("meta", "path", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        if tag not in ("path", "rect", "meta") or self.open[-1:] == [tag]:
            if not self.open or self.open.pop() != tag:
                self.faults.append("/" + tag)

    def handle_data(self, data):
        self.words.append(data)


class ReportPage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        cls.page = cls.folder / "report.html"
        trace = cls.folder / "<b>&'odd'.jsonl"  # a name that would be markup
        trace.write_text("".join((DATA / "kimi-conversation-200.jsonl").read_text().splitlines(True)[:12]))
        subprocess.run([KDA, "replay", trace, "--heads", "1", "--cache-mib", "16", "--spec", "2", "--verify", "3",
                        "--report", cls.page], check=True, capture_output=True, timeout=300)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def browser(self, *arguments):
        r = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
                            f"--user-data-dir={self.folder}/profile", *arguments], capture_output=True, text=True, timeout=180)
        self.assertEqual([line for line in r.stderr.splitlines() if "CONSOLE" in line], [])
        return r.stdout

    def test_text(self):
        outline = Outline()
        outline.feed(self.page.read_text())
        self.assertEqual((outline.faults, outline.open), ([], []))
        words = " ".join(outline.words)
        for text in ("kda replay: tiny on cpu", "12 of 12", "tokens/s", "Time to first token", "Time per output token",
                     "Prefix cache", "State pool", "What ran, and why", "decode_step", "Configuration", "max_batch_tokens",
                     "<b>&'odd'.jsonl", "right"):
            self.assertIn(text, words)
        self.assertNotIn("nan", words.lower().split())

    def test_pictures(self):
        shots = {}
        for name, options in {"wide": ["--window-size=1280,1600"],
                              "dark": ["--window-size=1280,1600", "--blink-settings=preferredColorScheme=0"]}.items():
            file = self.folder / f"{name}.png"
            self.browser(*options, f"--screenshot={file}", self.page.as_uri())
            rows, size = pixels(file)
            self.assertEqual((len(rows), len(rows[0])), (1600, 1280 * size))
            shots[name] = rows[2][2 * size]  # paper
            coloured = sum(1 for row in rows[::4] for i in range(0, len(row), 4 * size)
                           if max(row[i:i + 3]) - min(row[i:i + 3]) > 60)
            self.assertGreater(coloured, 800, name)  # bars
        self.assertGreater(shots["wide"], 200)
        self.assertLess(shots["dark"], 60)

    def test_phone(self):
        frame = self.folder / "phone.html"
        frame.write_text(PHONE.format(page=self.page.name))
        dom = self.browser("--allow-file-access-from-files", "--dump-dom", frame.as_uri())
        width = re.search(r"<title>width (\d+) of (\d+)", dom)
        self.assertIsNotNone(width, dom[:400])
        self.assertLessEqual(int(width[1]), int(width[2]))


if __name__ == "__main__":
    if CHROMIUM is None or not CHROMIUM.exists():
        print("skipped: no Chromium on this machine")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1])
