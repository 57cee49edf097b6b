"""Writes docs/figures.md, and the line for a run in benches/HISTORY.md."""

HEAD = """# Figures

`benches/figures/run` wrote this page and its plots from its measurements, and [performance.md](performance.md) explains them. Compare only
figures of the same section: each section is one run, and machines differ from hour to hour.

"""

ABOUT = {
    "dispatch": ("Dispatch", "From rows that the tail has read to what subscribers have received (`benches/dispatch.rs`)."),
    "producer": ("Recording", "What an event costs its transaction, in memory (`benches/producer.rs`)."),
    "engine": ("The embedded store", "Commits and reads (`benches/engine.rs`)."),
    "fold": ("Folds", "Databases with one event each, in memory (`benches/fold.rs`)."),
    "consumer": ("Consumers", "Rows that a consumer works through, and what many on a node cost (`benches/consumer.rs`)."),
    "feed": ("Feeds of documents", "Edits and reads of one feed in memory (`benches/feed.rs`)."),
    "load": ("Latency at a steady rate", "`replay - --rate N --writers 64`, from commit to delivery."),
    "databases": ("The whole bus over databases", "`replay - --writers 64`, each database created and updated."),
    "history": (
        "A real history at 500 events a second",
        "`replay FILE --rate 500`, from commit to delivery; on a cluster also without pauses between folds.",
    ),
    "stress": ("The whole bus under stress", "`tests/stress.rs` and `tests/from_nothing.rs` at full size."),
    "http": ("HTTP under load and attack", "`tests/http_load` at full size, against `notibus serve`."),
    "kills": ("kill -9 under load", "`tests/serve_killed.rs`, 20 times."),
    "foundationdb": ("On FoundationDB", "A cluster of one process on the same machine (`benches/foundationdb.rs`)."),
}

PLOTS = {
    "dispatch": ["dispatch-all", "dispatch-some"],
    "fold": ["folds"],
    "load": ["latency"],
    "databases": ["databases"],
}


def number(value):
    """Formats a number with three digits and a unit."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 999.5 * size else f"{value / size:.0f} {unit}"
    return f"{value:.3g}"


def duration(nanoseconds):
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds:.3g} ns"


def natural(name):
    """Returns a sort key that compares numbers in names as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.replace("/", " / ").split()]


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + "\n"


def cases(data):
    rows = [
        [name, duration(case["ns"]), f"{number(case['per_s'])}/s" if "per_s" in case else ""]
        for name, case in sorted(data["cases"].items(), key=lambda item: natural(item[0]))
    ]
    return table(["case", "one iteration", "elements"], rows) + printed(data)


def printed(data):
    return "```text\n" + "\n".join(data["lines"]) + "\n```\n\n" if data.get("lines") else ""


# The figures of a report besides latencies: the title of the column, and the format.
MORE = {
    "ratio": ("of that at 10,000", "{:.2f}".format),
    "leases_lost": ("leases lost", str),
    "nodes_dropped_out": ("nodes dropped out", str),
    "peak_memory_bytes": ("memory", lambda value: f"{number(value)}B"),
}


def by_size(data, what):
    more = [name for name in MORE if any(name in figures for sizes in data.values() for figures in sizes.values())]
    rows = [
        [
            kind, f"{int(size):,}", f"{figures['per_s']:,.0f}",
            *(duration(figures[q] * 1e3) for q in ("p50", "p99", "max")),
            *("" if figures.get(name) is None else MORE[name][1](figures[name]) for name in more),
        ]
        for kind, sizes in data.items()
        for size, figures in sorted(sizes.items(), key=lambda item: int(item[0]))
    ]
    return table(["store", what, "events/s", "p50", "p99", "slowest", *(MORE[name][0] for name in more)], rows)


def section(name, figures):
    title, about = ABOUT[name]
    data = figures["data"]
    if name == "load":
        body = by_size(data, "rate asked for")
    elif name == "databases":
        body = by_size(data, "databases")
    elif name == "history":
        body = by_size(data, "rate asked for")
    else:
        body = cases(data) if "cases" in data else printed(data)
    when = f"{figures['at']} UTC, commit {figures['commit']}, {figures['machine']}, load {figures['load']} before."
    plots = "".join(f"![{plot}](figures/{plot}.svg)\n\n" for plot in PLOTS.get(name, []))
    return f"## {title}\n\n{about} {when}\n\n{plots}{body}"


def write(figures, file):
    file.write_text(HEAD + "".join(section(name, figures[name]) for name in ABOUT if name in figures).rstrip() + "\n")


# The columns of HISTORY.md: a section, and one of its cases.
FOLLOWED = [
    ("dispatch", "batches/1000"),
    ("dispatch", "all/1000"),
    ("dispatch", "all/1000/broadcast"),
    ("dispatch", "exact/1000"),
    ("dispatch", "suffix/10000"),
    ("fold", "first/10000"),
    ("foundationdb", "fold"),
]


def remember(figures, file):
    """Adds the line for a complete run."""
    first = figures["dispatch"]
    line = [first["at"], first["commit"], first["machine"]]
    for name, case in FOLLOWED:
        found = figures.get(name, {}).get("data", {}).get("cases", {}).get(case)
        line.append(number(found["per_s"]) if found else "")
    at_500 = figures.get("load", {}).get("data", {}).get("memory", {}).get("500")
    line.append(f"{duration(at_500['p50'] * 1e3)}, {duration(at_500['p99'] * 1e3)}" if at_500 else "")
    with open(file, "a") as history:
        history.write("| " + " | ".join(line) + " |\n")
