"""Runs the measurements, keeps them in docs/figures/figures.json, and writes docs/figures.md and its plots from them."""

import argparse
import json
import sys

import measure
import page
import plots

FILE = measure.ROOT / "docs/figures/figures.json"


def main(sections):
    unknown = set(sections) - {*measure.SECTIONS, "page"}
    if unknown:
        sys.exit(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(measure.SECTIONS)}")
    wanted = [name for name in measure.SECTIONS if not sections or name in sections]
    FILE.parent.mkdir(exist_ok=True)
    figures = json.loads(FILE.read_text()) if FILE.exists() else {}
    measure.build(wanted)
    for name in wanted:
        print(f"== {name}", flush=True)
        circumstances = measure.circumstances()
        data = measure.SECTIONS[name]()
        if data is None:
            print(f"skipped: {name}")
            continue
        figures[name] = {**circumstances, "data": data}
        FILE.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    plots.draw(figures, FILE.parent)
    page.write(figures, measure.ROOT / "docs/figures.md")
    if not sections:
        page.remember(figures, measure.ROOT / "benches/HISTORY.md")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--history", metavar="FILE", help="the history of the section `history`, as `replay` reads it")
parser.add_argument("sections", nargs="*", metavar="SECTION")
arguments = parser.parse_args()
measure.HISTORY = arguments.history
main(arguments.sections)
