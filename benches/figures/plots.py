"""Draws the plots of docs/figures.md as SVG."""

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter, NullFormatter

pyplot.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "notibus", "font.family": "sans-serif", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd",
    "lines.marker": "o", "lines.markersize": 4,
})


def chart(file, title, across, up, lines):
    """Draws one chart with logarithmic axes; `lines` has the points of each line by its name."""
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return
    figure, axes = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points)), "--" if name.endswith("p99") else "-", label=name)
    axes.set(title=title, xlabel=across, ylabel=up, xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(EngFormatter(sep=""))
        axis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def by_count(cases, kind, end=""):
    """Returns elements per second, by the number in each case's name."""
    found = {}
    for name, case in cases.items():
        first, _, rest = name.partition("/")
        count, _, last = rest.partition("/")
        if first == kind and last == end and count.isdigit():
            found[int(count)] = case["per_s"]
    return list(found.items())


def over(section, kind, value, scale=1):
    return [(int(size), figures[value] / scale) for size, figures in section.get(kind, {}).items()]


def draw(figures, folder):
    cases = figures.get("dispatch", {}).get("data", {}).get("cases", {})
    chart(folder / "dispatch-all.svg", "Subscribers of everything", "subscribers", "deliveries/s", {
        "by batch": by_count(cases, "batches"),
        "one at a time": by_count(cases, "all"),
        "tokio broadcast": by_count(cases, "all", "broadcast"),
    })
    kinds = ["exact", "prefix", "suffix", "glob"]
    chart(folder / "dispatch-some.svg", "Subscribers of one name or pattern each", "subscribers", "rows/s", {
        **{kind: by_count(cases, kind) for kind in kinds},
        "tokio broadcast, exact": by_count(cases, "exact", "broadcast"),
    })
    folds = figures.get("fold", {}).get("data", {}).get("cases", {})
    chart(folder / "folds.svg", "Folds by one node, in memory", "databases", "databases/s", {
        "into an empty feed": by_count(folds, "first"),
        "into a feed with a row of each": by_count(folds, "again"),
    })
    load = figures.get("load", {}).get("data", {})
    chart(folder / "latency.svg", "From commit to delivery", "events/s", "ms", {
        f"{kind}, {quantile}": over(load, kind, quantile, 1_000) for kind in load for quantile in ("p50", "p99")
    })
    sizes = figures.get("databases", {}).get("data", {})
    chart(folder / "databases.svg", "The whole bus, each database created and updated", "databases", "events/s", {
        kind: over(sizes, kind, "per_s") for kind in sizes
    })
