"""Runs the benchmarks, the example `replay` and the large tests, and returns what they printed as plain data."""

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
REPLAY = TARGET / "release/examples/replay"

# The file for the section `history`, set by `--history`.
HISTORY = None

# The numbers of databases in the section `databases`, the one that others are compared with, and events per second in the section `load`.
SIZES = [1_000, 10_000, 100_000, 500_000, 1_000_000]
COMPARED_SIZE = 10_000
RATES = [100, 500, 2_000, 5_000, 10_000, 20_000]
SECONDS = 5


def run(*command, stdin=None, env=None):
    """Returns the standard output of a command, which must succeed."""
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, **(env or {})},
    )
    return done.stdout


def has_cluster():
    return shutil.which("fdbserver") is not None and shutil.which("fdbcli") is not None


def features():
    return "cli,http,foundationdb" if has_cluster() else "cli,http"


def build(sections):
    """Builds everything that is needed, so that no compiler runs during a measurement."""
    if sections:
        run("cargo", "build", "--release", "--locked", "--features", features(), "--bins", "--example", "replay")
    benches = [name for name in ("dispatch", "producer", "engine", "fold", "consumer", "feed") if name in sections]
    for name in benches + ["foundationdb"] * ("foundationdb" in sections and has_cluster()):
        run("cargo", "bench", "--locked", "--no-run", "--features", features(), "--bench", name)
    tests = {"stress": ["stress", "from_nothing"], "http": ["http_load"], "kills": ["serve_killed"]}
    for name in (test for section in tests if section in sections for test in tests[section]):
        run("cargo", "test", "--release", "--locked", "--no-run", "--features", features(), "--test", name)


def circumstances():
    """Waits until the machine is idle. Returns the time, the commit, the load and the machine of a measurement."""
    for _ in range(10):
        if os.getloadavg()[0] < 1.5:
            break
        time.sleep(6)
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "at": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": run("git", "rev-parse", "--short", "HEAD").strip(),
        "load": round(os.getloadavg()[0], 1),
        "machine": f"{os.cpu_count()} cores, {model or platform.machine()}",
    }


def criterion(bench):
    """Runs a benchmark. Returns for each case nanoseconds per iteration, and elements per second if it counts elements."""
    shutil.rmtree(TARGET / "criterion", ignore_errors=True)
    printed = run("cargo", "bench", "--locked", "--features", features(), "--bench", bench, "--", "--noplot")
    cases = {}
    for file in (TARGET / "criterion").rglob("new/estimates.json"):
        about = json.loads((file.parent / "benchmark.json").read_text())
        nanoseconds = json.loads(file.read_text())["mean"]["point_estimate"]
        case = {"ns": nanoseconds}
        if about.get("throughput"):
            case["per_s"] = about["throughput"]["Elements"] / nanoseconds * 1e9
        cases[about["full_id"].split("/", 1)[1]] = case
    noise = ("Benchmarking", "test result", "Found ", "Warning")
    lines = [line for line in printed.splitlines() if ": " in line and not line.startswith((" ", *noise))]
    return {"cases": cases, "lines": [line for line in lines if "time:" not in line]}


def history(databases, events):
    """Returns a file for `replay`, with a history that creates databases and then updates them in turn."""
    file = tempfile.TemporaryFile("w+")
    for n in range(databases):
        file.write(f"1\t{n}\tcreate\tdb-{n}\t\n")
    for n in range(events):
        file.write(f"2\t{databases + n}\tupdate\tdb-{n % databases}\td\n")
    file.seek(0)
    return file


def replay(store, file, *options):
    """Returns the report of `replay`, with its peak memory."""
    command = [str(part) for part in (REPLAY, "-", "--json", "--store", store, *options)]
    with subprocess.Popen(command, cwd=ROOT, stdin=file, stdout=subprocess.PIPE, text=True) as child:
        printed = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise subprocess.CalledProcessError(child.returncode, command, printed)
    return {**json.loads(printed), "peak_memory_bytes": usage.ru_maxrss * 1_024}


@contextmanager
def cluster():
    """Runs a FoundationDB cluster of one process, with its data in memory and its log on disk, and yields its store."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        file = Path(folder, "fdb.cluster")
        file.write_text(f"figures:figures@127.0.0.1:{port}\n")
        server = subprocess.Popen(
            ["fdbserver", "-p", f"127.0.0.1:{port}", "-C", file, "-d", folder, "-L", folder],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        try:
            run("fdbcli", "-C", file, "--timeout", "30", "--exec", "configure new single memory")
            yield f"fdb:{file}"
        finally:
            server.kill()
            server.wait()


@contextmanager
def folder():
    with tempfile.TemporaryDirectory(dir=TARGET) as path:
        yield f"dir:{path}/store"


def stores():
    """Returns all kinds of stores, each with a function that opens an empty one."""

    @contextmanager
    def memory():
        yield "memory"

    kinds = {"memory": memory, "folder": folder}
    return {**kinds, "cluster": cluster} if has_cluster() else kinds


def load():
    """Measures the latency from commit to delivery at steady rates, on each kind of store."""
    found = {}
    for kind, opened in stores().items():
        found[kind] = {}
        for rate in RATES:
            with opened() as store, history(min(1_000, rate), rate * SECONDS) as file:
                report = replay(store, file, "--rate", rate, "--writers", 64)
            found[kind][str(rate)] = {**report["latency_us"], "per_s": report["events_per_second"]}
            print(kind, rate, found[kind][str(rate)], flush=True)
            if report["events_per_second"] < 0.9 * rate:
                break
    return found


def figures_of(report):
    """Returns the part of a report of `replay` that is kept."""
    kept = ("leases_lost", "nodes_dropped_out", "peak_memory_bytes")
    return {**report["latency_us"], "per_s": report["events_per_second"], **{name: report[name] for name in kept}}


def databases():
    """Measures how fast the whole bus is with more and more databases, each created and then updated."""
    found = {}
    for kind, opened in stores().items():
        sizes = found[kind] = {}
        for size in SIZES if kind == "memory" else SIZES[:3]:
            with opened() as store, history(size, size) as file:
                sizes[str(size)] = figures_of(replay(store, file, "--writers", 64))
            if str(COMPARED_SIZE) in sizes:
                sizes[str(size)]["ratio"] = sizes[str(size)]["per_s"] / sizes[str(COMPARED_SIZE)]["per_s"]
            print(kind, size, sizes[str(size)], flush=True)
    return found


def real_history():
    """Measures the latency of a real history at 500 events a second; on a cluster, also without pauses between folds."""
    if HISTORY is None:
        return None
    found = {}
    for kind, opened in stores().items():
        for options in [[]] + [["--fold-interval-max", "0s"]] * (kind == "cluster"):
            with opened() as store, open(HISTORY, "rb") as file:
                case = " ".join([kind, *options])
                found[case] = {"500": figures_of(replay(store, file, "--rate", 500, *options))}
            print(case, found[case], flush=True)
    return found


def tests(*names, **env):
    """Runs large tests. Returns what they print, without the lines of the test runner."""
    lines = []
    for name in names:
        options = ["--nocapture", "--test-threads", "1"]
        printed = run(
            "cargo", "test", "--release", "--locked", "--features", features(), "--test", name, "--", *options, env=env,
        )
        runner = re.compile(r"^(running \d|test result|test .* \.\.\. |\s*$)")
        lines += [re.sub(r"^test \S+ \.\.\. ", "", line) for line in printed.splitlines()]
        lines = [line for line in lines if line not in ("ok", "") and not runner.match(line)]
    return {"lines": lines}


def foundationdb():
    return criterion("foundationdb") if has_cluster() else None


SECTIONS = {
    "dispatch": lambda: criterion("dispatch"),
    "producer": lambda: criterion("producer"),
    "engine": lambda: criterion("engine"),
    "fold": lambda: criterion("fold"),
    "consumer": lambda: criterion("consumer"),
    "feed": lambda: criterion("feed"),
    "load": load,
    "databases": databases,
    "history": real_history,
    "stress": lambda: tests("stress", "from_nothing", NOTIBUS_STRESS="full", NOTIBUS_FROM_NOTHING="full"),
    "http": lambda: tests("http_load", NOTIBUS_LOAD="full"),
    "kills": lambda: tests("serve_killed", NOTIBUS_KILLS="20"),
    "foundationdb": foundationdb,
}
