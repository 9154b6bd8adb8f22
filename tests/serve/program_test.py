#!/usr/bin/env python3
"""The kda program from outside: exit codes, messages, files. Usage: program_test.py KDA DATA_DIR"""
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

KDA, DATA = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
GOOD = "".join(
    '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}\n' % (t, n, m, list(range(-(-n // 512))))
    for t, n, m in [(0, 600, 5), (1, 1100, 0), (2, 1, 3), (3, 70, 1)])
SMALL = ["--heads", "1", "--cache-mib", "16"]


def run(*arguments, stdin=None, cwd=None):
    return subprocess.run([KDA, *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=300, cwd=cwd)


class Program(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.trace = self.folder / "trace.jsonl"
        self.trace.write_text(GOOD)

    def names(self):
        return sorted(p.name for p in self.folder.iterdir())

    def refused(self, *arguments, message, stdin=None):
        """Bad usage: exit code 2, one message on standard error, nothing on standard output, no file left."""
        before = self.names()
        r = run(*arguments, stdin=stdin, cwd=self.folder)
        self.assertEqual(r.returncode, 2, (arguments, r.stdout, r.stderr))
        self.assertIn(message, r.stderr)
        # The library lists candidates in lines of their own; AddressSanitizer warns of absurd sizes.
        starts = [line for line in r.stderr.splitlines() if not line.startswith(("  ", "=="))]
        self.assertEqual(len(starts), 1, r.stderr)
        self.assertEqual(r.stdout, "")
        self.assertEqual(self.names(), before)

    def test_help_and_version(self):
        self.assertEqual(run("--help").returncode, 0)
        r = run("replay", "--help")
        self.assertEqual(r.returncode, 0)
        for option in ("--max-batch-tokens", "--spec-mode", "--digests", "--prefix-cache", "--timeline"):
            self.assertIn(option, r.stdout)
        self.assertRegex(run("--version").stdout, r"^kda \d+\.\d+\.\d+ \([0-9a-f]+\)\n$")

    def test_bad_usage(self):
        self.refused(message="subcommand")
        self.refused("reply", message="reply")
        self.refused("replay", message="trace")
        self.refused("replay", self.trace, "--no-such-option", message="--no-such-option")
        self.refused("replay", self.trace, "--spec", "many", message='kda replay: --spec: wanted an integer, got "many"')
        self.refused("replay", self.trace, "--spec", "1.5", message='--spec: wanted an integer, got "1.5"')
        self.refused("replay", self.trace, "--seed", "-1", message='--seed: wanted an integer >= 0, got "-1"')
        self.refused("replay", self.trace, "--accept", "", message='--accept: wanted a number, got ""')
        self.refused("replay", self.trace, "--speed", "3", message="--speed: wanted --pace trace beside it")
        self.refused("replay", self.trace, "--model", "kimi-linear", "--cache-mib", "1",
                     message="--cache-mib: wanted 0 (no cache) or at least 3")
        self.refused("replay", self.trace, "--slots", 0, message="--slots: wanted an integer in 1..1073741824, got 0")
        self.refused("replay", self.trace, "--preempt", "nan", message="--preempt: wanted a probability in [0, 1]")
        self.refused("replay", "", message='trace: wanted a file name, got ""')
        self.refused("info", "--io", "int8", message='--io: wanted one of bf16, fp16, fp32, got "int8"')
        self.refused("info", "--io", "2", message='got "2"')
        for verb in ("info", "check", "bench"):
            self.refused(verb, "--threads", "-1", message='--threads: wanted an integer in 0..4096, got "-1"')
            self.refused(verb, "--threads", "2147483647", message='in 0..4096, got "2147483647"')
        self.refused("replay", self.trace, "--spec", "99999999999", message="--spec: wanted a value in its range")
        self.refused("replay", self.trace, "--skip-bad=maybe", message="--skip-bad: wanted a value in its range")
        self.refused("check", "--backend", "zzz", "--quick", message='got "zzz"')
        self.refused("check", "--filter", "nosuch", message='got every operator, "nosuch"')
        self.refused("check", "--vectors", self.folder, message="--vectors: wanted a folder of vector files")
        self.refused("check", "--vectors", self.folder / "none", message="none: cannot be listed")
        self.refused("bench", "copy", "--rows", 2**63 - 1, message="--rows: wanted an integer in 1..1073741824")
        self.refused("bench", "--device", "tpu", message="--device: ")
        self.refused("bench", "--device", "cuda", "metadata", message="cuda")
        self.refused("bench", "targets", message="targets are of a device; wanted with --device cuda")
        self.refused("bench", "--modes", "graph,clock", message='--modes: wanted one of enqueue, event, graph, wall, got "clock"')
        self.refused("bench", "--rounds", "0", message='--rounds: wanted an integer in 1..2147483647, got "0"')
        self.refused("replay", self.trace, "--spec", "16", message="--spec: wanted an integer in 0..15, got 16")
        self.refused("replay", self.trace, "--model", "kimi", message="--model: wanted one of")
        self.refused("replay", self.trace, "--tp", "3", message="--tp: wanted ranks that divide 2 heads, got 3")
        self.refused("replay", self.trace, "--prefix-cache", "maybe", message="--prefix-cache: wanted on or off")
        self.refused("replay", self.trace, "--device", "cuda", message="cuda")
        self.refused("replay", self.trace, "--prefill-backend", "Triton", message='got "Triton"')
        self.refused("replay", self.trace, "--prefill-backend", "fused", message="the named backend was refused")
        self.refused("replay", self.trace, "--io", "fp8", message="--io: wanted fp32, bf16 or fp16")

    def test_more_than_there_is_memory_for(self):
        # More than an address space holds, so that no system promises it.
        for options in (["--slots", 1073741824, "--cache-mib", 0], ["--cache-mib", 200000000]):
            self.refused("replay", self.trace, "--verify", 0, *options, message=f"{options[0]} {options[1]}")

        # Sizes whose product no integer holds.
        r = run("bench", "prefill", "--rounds", 1, "--tokens", 2**30, "--heads", 2**30)
        self.assertEqual((r.returncode, r.stderr.strip().splitlines()[-1]), (1, "kda: out of memory"))

    def test_bad_input(self):
        bad = self.folder / "bad.jsonl"
        outputs = ["--json", self.folder / "out.json", "--digests", self.folder / "out.txt"]
        for line, message in [
            ('{"timestamp": 0, "input_length": 1e30, "output_length": 1, "hash_ids": [1]}',
             "bad.jsonl:5: input_length: wanted an integer in 1..2147483647, got 1e30"),
            ('{"timestamp": 0, "input_length": 5, "output_length": -1, "hash_ids": [1]}', "bad.jsonl:5: output_length"),
            ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "bad.jsonl:5: hash_ids"),
            ('{"timestamp": 0, "input_len', "bad.jsonl:5: wanted a complete JSON object"),
            ("\x00\x01", "bad.jsonl:5: wanted valid JSON"),
        ]:
            bad.write_text(GOOD + line)
            self.refused("replay", bad, *outputs, message=message)
        self.refused("replay", self.folder / "none.jsonl", *outputs, message="none.jsonl: wanted a readable file")
        self.refused("replay", self.folder, *outputs, message="got a directory")
        bad.write_text("")
        self.refused("replay", bad, message="wanted at least one request")
        self.refused("replay", "-", stdin="x,y\n1,2\n", message="<stdin>:1: line: wanted a Mooncake JSON object")

    def test_outputs_that_cannot_be_written(self):
        replay = ["replay", self.trace, *SMALL, "--verify", 0]
        self.refused(*replay, "--json", self.folder / "no" / "x.json", message="--json: wanted a file that can be written")
        self.refused(*replay, "--digests", self.folder, message="--digests: wanted a file, got the directory")
        self.refused(*replay, "--json", "", message='--json: wanted a file name, got ""')
        self.refused(*replay, "--json", "out", "--digests", "./out", message="--digests: wanted another file than that of")
        self.refused(*replay, "--json", self.trace, message="--json: wanted another file than the input")
        self.assertEqual(self.trace.read_text(), GOOD)
        self.refused("check", "--quick", "--json", "no/x.json", message="--json: wanted a file that can be written")
        self.refused("bench", "metadata", "--json", self.trace, message="--json: wanted a file that does not exist")

    def test_full_disks_leave_no_file(self):
        r = run("replay", self.trace, *SMALL, "--verify", 0, "--json", "r.json", "--digests", "/dev/full", cwd=self.folder)
        self.assertEqual(r.returncode, 2, r.stderr)
        self.assertIn("--digests: wanted a file that can be written, got /dev/full: No space left on device", r.stderr)
        self.assertIn("4 of 4 finished", r.stdout)
        self.assertEqual(self.names(), ["trace.jsonl"])
        with open("/dev/full", "w") as full:
            r = subprocess.run([KDA, "replay", self.trace, *SMALL, "--verify", "0", "--json", self.folder / "r.json"],
                               stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
        self.assertEqual(r.returncode, 2)
        self.assertIn("standard output: could not be written", r.stderr)
        self.assertEqual(self.names(), ["r.json", "trace.jsonl"])  # the report itself could be

    def test_killed_half_way_and_run_again(self):
        self.trace.write_text(GOOD * 40)
        replay = [KDA, "replay", str(self.trace), *SMALL, "--verify", "1", "--json", str(self.folder / "r.json"), "--digests",
                  str(self.folder / "d.txt"), "--report", str(self.folder / "r.html")]
        def whole():
            """What is there is whole: a run that is killed has written a file or has not, and left one of its own at most."""
            names = {name for name in self.names() if not name.endswith(".tmp")} - {"trace.jsonl"}
            self.assertLessEqual(names, {"d.txt", "r.html", "r.json"})
            if "d.txt" in names:
                self.assertEqual(len((self.folder / "d.txt").read_text().splitlines()), 160)
            if "r.html" in names:
                self.assertTrue((self.folder / "r.html").read_text().endswith("</html>\n"))
            if "r.json" in names:
                self.assertTrue(json.loads((self.folder / "r.json").read_text())["complete"])
            return names

        start = time.monotonic()
        subprocess.run(replay, check=True, capture_output=True, timeout=300)
        took = time.monotonic() - start
        self.assertEqual(whole(), {"d.txt", "r.html", "r.json"})
        for part in (0.02, 0.2, 0.5, 0.8, 0.95, 1.0):  # of the run's time: also while it writes, and when it is done
            for name in whole():
                (self.folder / name).unlink()
            process = subprocess.Popen(replay, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(part * took)
            process.kill()
            process.wait(timeout=300)
            whole()
        subprocess.run(replay, check=True, capture_output=True, timeout=300)
        self.assertEqual(whole(), {"d.txt", "r.html", "r.json"})

    def test_a_reader_that_leaves_does_not_cost_the_report(self):
        process = subprocess.Popen([KDA, "replay", self.trace, *SMALL, "--verify", "0", "--json", self.folder / "r.json"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()
        process.stderr.read()
        self.assertEqual(process.wait(timeout=300), 2)
        process.stderr.close()
        self.assertTrue(json.loads((self.folder / "r.json").read_text())["complete"])

    def test_names_of_any_bytes(self):
        odd = self.folder / b"tr\xff\xfece.jsonl".decode(errors="surrogateescape")
        odd.write_text(GOOD)
        r = subprocess.run([KDA, "replay", odd, *SMALL, "--verify", "0", "--json", self.folder / "r.json"],
                           capture_output=True, timeout=300)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("\ufffd", json.loads((self.folder / "r.json").read_text())["config"]["trace"])

    def test_a_run(self):
        out = {name: self.folder / name for name in ("r.json", "r.html", "d.txt", "t.json")}
        r = run("replay", self.trace, *SMALL, "--verify", 4, "--spec", 2, "--json", out["r.json"], "--digests",
                out["d.txt"], "--timeline", out["t.json"], "--report", out["r.html"])
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("4 of 4 finished", r.stdout)
        self.assertEqual(self.names(), ["d.txt", "r.html", "r.json", "t.json", "trace.jsonl"])
        self.assertTrue(out["r.html"].read_text().endswith("</html>\n"))
        report = json.loads(out["r.json"].read_text())
        self.assertTrue(report["verify"]["ok"])
        self.assertEqual(report["tokens"]["decoded"], 6)
        lines = [line.split() for line in out["d.txt"].read_text().splitlines()]
        self.assertEqual([line[:3] for line in lines], [["0", "600", "5"], ["1", "1100", "0"], ["2", "1", "3"], ["3", "70", "1"]])
        self.assertTrue(all(len(line[3]) == 32 for line in lines))
        names = {event["name"] for event in json.loads(out["t.json"].read_text())["traceEvents"]}
        self.assertLessEqual({"step", "prefill", "decode_step", "conv", "gated_norm"}, names)

    def test_standard_input_and_skipped_lines(self):
        r = run("replay", "-", *SMALL, "--skip-bad", "--verify", 0, "--digests", self.folder / "d.txt",
                stdin=GOOD + "garbage\n" + GOOD)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn("skipped 1 bad line, the first: <stdin>:5:", r.stderr)
        self.assertEqual(len((self.folder / "d.txt").read_text().splitlines()), 8)

    def test_shipped_data(self):
        r = run("replay", DATA / "kimi-conversation-200.jsonl", *SMALL, "--limit", 2, "--verify", 0)
        self.assertEqual(r.returncode, 0, r.stderr)

    def test_nothing_verified_is_not_called_right(self):
        r = run("replay", self.trace, *SMALL, "--verify", 0, "--json", self.folder / "r.json")
        self.assertEqual(r.returncode, 0)
        self.assertIsNone(json.loads((self.folder / "r.json").read_text())["verify"]["ok"])

    def test_interrupt(self):
        later = '{"timestamp": 900000, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n'
        self.trace.write_text(GOOD + later)
        for wait in (1, 4, 16):  # a busy machine may need longer to finish the first requests
            process = subprocess.Popen([KDA, "replay", str(self.trace), *SMALL, "--pace", "trace", "--json",
                                        str(self.folder / "r.json"), "--digests", str(self.folder / "d.txt")],
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            time.sleep(wait)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            if process.returncode == 130 and "4 of 5 finished" in out:
                break
        self.assertEqual(process.returncode, 130, err)
        self.assertIn("INCOMPLETE", out)
        report = json.loads((self.folder / "r.json").read_text())
        self.assertFalse(report["complete"])
        self.assertEqual(report["requests"]["finished"], 4)
        self.assertEqual(len((self.folder / "d.txt").read_text().splitlines()), 4)
        self.assertEqual(self.names(), ["d.txt", "r.json", "trace.jsonl"])


unittest.main(argv=sys.argv[:1], verbosity=1)
