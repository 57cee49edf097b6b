"""The copy of the project that gets mistakes: how it is made and built, and how worlds look for a mistake."""

import os
import pathlib
import re
import shutil
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLACE = ROOT / "target/mutations"
COPY = PLACE / "copy"

BUILT = ["--release", "--locked", "--features", "simulation"]


def copy():
    """Makes the copy, without the mistakes but with their switch."""
    shutil.rmtree(COPY, ignore_errors=True)
    # The settings of cargo in `.cargo` apply to the copy where it lies.
    left_out = shutil.ignore_patterns("target", ".git", ".cargo", "__pycache__")
    shutil.copytree(ROOT, COPY, ignore=left_out)
    shutil.copy(HERE / "switch.rs", COPY / "src")
    lib = COPY / "src/lib.rs"
    # Mistakes leave something unused.
    said = "#![allow(warnings)]\n" + lib.read_text()
    lib.write_text(said + "mod switch;\npub(crate) use switch::{is_on, mutant};\n")


def cargo(*arguments, env=None, seconds_max=None, **settings):
    """Runs cargo on the copy. If that takes too long, it and what it has started are ended."""
    env = os.environ | (env or {}) | {"CARGO_TARGET_DIR": str(PLACE / "build")}
    limit = ["timeout", str(seconds_max)] if seconds_max else []
    return subprocess.run([*limit, "cargo", *arguments], cwd=COPY, env=env, **settings)


def build():
    """Builds the program, and sees that worlds are in order as long as no mistake is switched on."""
    cargo("build", *BUILT, "--bin", "notibus", check=True)
    if first := simulate("", 300):
        raise SystemExit(f"without a mistake, seed {first[0]} fails: {first[1]}")


def simulate(mistake, seeds, timeout=None):
    """The first of `seeds` worlds that finds `mistake`, and how it fails; None if none does."""
    program = PLACE / "build/release/notibus"
    command = [program, "simulate", "--seeds", str(seeds), "--threads", "1", "--shrink", "0"]
    env = os.environ | {"NOTIBUS_MUTATION": mistake}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    if failed := re.search(r"^seed (\d+) failed: (.*)", ended.stderr, re.M):
        return int(failed[1]), failed[2]
    # Such as a panic while another one unwinds.
    return (0, f"the program was ended by signal {-ended.returncode}") if ended.returncode < 0 else None
