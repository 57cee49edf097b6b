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


def cargo(*arguments, env=None, **settings):
    """Runs cargo on the copy."""
    env = os.environ | (env or {}) | {"CARGO_TARGET_DIR": str(PLACE / "build")}
    return subprocess.run(["cargo", *arguments], cwd=COPY, env=env, **settings)


def build():
    """Builds the program, and sees that worlds are in order as long as no mistake is switched on."""
    cargo("build", *BUILT, "--bin", "notibus", check=True)
    if first := simulate("", 300):
        raise SystemExit(f"without a mistake, seed {first[0]} fails: {first[1]}")


def limited(command, seconds_max):
    """`command` with limits of processor time and memory: a mistake may loop or allocate without an end."""
    return ["prlimit", f"--cpu={seconds_max}", "--as=12000000000", *command]


def simulate(mistake, seeds, seconds_max="unlimited"):
    """The first of `seeds` worlds that finds `mistake`, and how it fails; None if none does."""
    program = PLACE / "build/release/notibus"
    command = [program, "simulate", "--seeds", str(seeds), "--threads", "1", "--shrink", "0"]
    env = os.environ | {"NOTIBUS_MUTATION": mistake}
    ended = subprocess.run(limited(command, seconds_max), env=env, capture_output=True, text=True)
    if failed := re.search(r"^seed (\d+) failed: (.*)", ended.stderr, re.M):
        return int(failed[1]), failed[2]
    # Such as a panic while another one unwinds, or the limit of time.
    return (0, f"the program was ended by signal {-ended.returncode}") if ended.returncode < 0 else None
