"""Makes and builds the copy of the project that gets mistakes, and lets worlds look for a mistake."""

import json
import os
import pathlib
import re
import shutil
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLACE = ROOT / "target/mutations"
COPY = PLACE / "copy"

# Without the command, which nothing here needs.
BUILT = ["--release", "--locked", "--no-default-features", "--features", "http"]
# Builds the simulation.
WORLDS = ["test", *BUILT, "--no-run", "--test", "simulation", "--message-format=json"]

# The program that runs worlds, once it is built.
programs = []


def copy():
    """Makes the copy, without the mistakes but with their switch."""
    shutil.rmtree(COPY, ignore_errors=True)
    # The copy is below the project, so the settings in its `.cargo` apply anyway.
    left_out = shutil.ignore_patterns("target", ".git", ".cargo", "__pycache__")
    shutil.copytree(ROOT, COPY, ignore=left_out)
    shutil.copy(HERE / "switch.rs", COPY / "src")
    lib = COPY / "src/lib.rs"
    # Mistakes leave some code unused.
    said = "#![allow(warnings)]\n" + lib.read_text()
    lib.write_text(said + "mod switch;\npub(crate) use switch::{is_on, mutant};\n")


def cargo(*arguments, env=None, **settings):
    """Runs cargo on the copy."""
    env = os.environ | (env or {}) | {"CARGO_TARGET_DIR": str(PLACE / "build")}
    return subprocess.run(["cargo", *arguments], cwd=COPY, env=env, **settings)


def built(lines):
    """Reads the path of the program from the output of cargo."""
    programs[:] = [of["executable"] for of in map(json.loads, lines) if of.get("executable") and of["profile"]["test"]]


def build():
    """Builds the simulation, and checks that worlds succeed as long as no mistake is switched on."""
    built(cargo(*WORLDS, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines())
    if first := simulate("", 300):
        raise SystemExit(f"without a mistake, seed {first[0]} fails: {first[1]}")


def limited(command, seconds_max):
    """Returns `command` with limits on processor time and memory: a mistake may loop or allocate without end."""
    return ["prlimit", f"--cpu={seconds_max}", "--as=12000000000", *command]


def simulate(mistake, seeds, seconds_max="unlimited"):
    """Returns the first of `seeds` worlds that finds `mistake`, and how it fails; None if none does."""
    command = [programs[0], "--seeds", str(seeds), "--test-threads", "1"]
    env = os.environ | {"NOTIBUS_MUTATION": mistake}
    ended = subprocess.run(limited(command, seconds_max), env=env, capture_output=True, text=True)
    if failed := re.search(r"^seed (\d+) failed: (.*)", ended.stderr, re.M):
        return int(failed[1]), failed[2]
    # For example by a panic while another one unwinds, or by the time limit.
    return (0, f"the program was ended by signal {-ended.returncode}") if ended.returncode < 0 else None
