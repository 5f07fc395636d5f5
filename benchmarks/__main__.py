"""`python -m benchmarks`: measures, prints tables, writes JSON and a picture."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, memory, report
from benchmarks.contenders import ADAM, BROADCAST, OVERHEAD, Contender, update_contenders
from benchmarks.jobs import Pool
from benchmarks.profiles import PROFILES
from benchmarks.rounds import Rounds, Settings

PARTS = ("update", "adam", "overhead", "rebroadcast", "broadcast", "memory")
UPDATE_PROFILES = ("1000x256", "resnet50", "vgg16", "100MB")
# Each takes new processes.
COLD_ROUNDS = 5
RESULTS = Path(__file__).resolve().parent / "results"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    add("--profiles", nargs="+", choices=list(PROFILES), help="of the update step (default: all but cnn)")
    add("--contenders", nargs="+", default=[], metavar="PATTERN", help="of the update step, like 'plain/*'")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    add("--rounds", type=int, help="(default: 15; 5 with --quick)")
    add("--block-seconds", type=float, help="one contender's turn (default: 0.4; 0.1 with --quick)")
    add("--quick", action="store_true", help="2 ranks, few short rounds, no VGG-16: shows that it works")
    add("--untuned", action="store_true", help="also hvdvars with HVDVARS_TRANSPORT_DEFAULTS=0")
    add("--threads", type=int, help="the same TensorFlow threads for all (default: what each user gets)")
    add("--seed", type=int, default=0, help="of the order in each round (default: 0)")
    add("--limit", type=float, default=7200, help="seconds after which a job is ended (default: 7200)")
    add("--output", type=Path, default=RESULTS, help="folder of the JSON and the PNG")
    add("--show", type=Path, metavar="JSON", help="print and draw an earlier run again, measure nothing")
    options = parser.parse_args(arguments)
    if options.quick:
        options.ranks = options.ranks if "--ranks" in arguments else [2]
        options.profiles = options.profiles or [name for name in UPDATE_PROFILES if name != "vgg16"]
    options.profiles = options.profiles or list(UPDATE_PROFILES)
    options.rounds = options.rounds or (5 if options.quick else 15)
    options.block_seconds = options.block_seconds or (0.1 if options.quick else 0.4)
    try:
        options.chosen = update_contenders(options.contenders, untuned=options.untuned)
    except ValueError as error:
        parser.error(str(error))
    return options


def plan(options: argparse.Namespace) -> list[tuple[str, str, tuple[Contender, ...]]]:
    """Part, profile and contenders of every series, for each number of ranks."""
    series: list[tuple[str, str, tuple[Contender, ...]]] = []
    if "update" in options.parts:
        series += [("update", profile, tuple(options.chosen)) for profile in options.profiles]
    fixed = (
        ("adam", "resnet50", ADAM),
        ("overhead", "cnn", OVERHEAD),
        ("rebroadcast", "1000x256", BROADCAST),
        ("broadcast", "1000x256", BROADCAST),
    )
    return series + [one for one in fixed if one[0] in options.parts]


def settings_of(part: str, options: argparse.Namespace) -> Settings:
    if part == "broadcast":
        return Settings(min(options.rounds, COLD_ROUNDS), 0.0, single=True, cold=True, seed=options.seed)
    return Settings(options.rounds, options.block_seconds, single=part == "rebroadcast", seed=options.seed)


def count_blocks(options: argparse.Namespace) -> int:
    """Progress steps for one number of ranks."""
    blocks = len(ADAM) if "memory" in options.parts else 0
    for part, _, contenders in plan(options):
        settings = settings_of(part, options)
        blocks += len(contenders) * (settings.rounds + (not settings.cold))
    return blocks


def begin(options: argparse.Namespace) -> dict[str, Any]:
    """Results with nothing measured yet."""
    settings = {key: getattr(options, key) for key in ("rounds", "block_seconds", "seed", "threads")}
    return {
        "machine": machine.describe(),
        "settings": {**settings, "command": sys.argv[1:]},
        "series": [],
        "memory": [],
    }


def measure(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
    """Adds everything asked for to the results; jobs of one number of ranks live together and sleep in turn."""
    from tqdm import tqdm

    threads = {} if options.threads is None else machine.thread_settings(options.threads)
    # In a log file, a line now and then instead of a bar that moves.
    interval = 0.1 if sys.stderr.isatty() else 20
    total = len(options.ranks) * count_blocks(options)
    with tqdm(total=total, dynamic_ncols=True, unit="block", mininterval=interval, maxinterval=60) as bar:

        def tick(what: str) -> None:
            bar.set_description_str(f"{what:<44.44}", refresh=False)
            bar.update()

        for ranks in options.ranks:
            with Pool(ranks, folder, options.limit, threads) as pool:
                for part, profile, contenders in plan(options):
                    found = Rounds(pool, part, profile, contenders, settings_of(part, options)).measure(tick)
                    results["series"].append(found.as_dict())
            if "memory" in options.parts:
                used, failed = memory.measure(ranks, folder, options.limit, threads, tick)
                results["memory"] += used
                results["series"] += failed


def show(results: dict[str, Any], picture: Path) -> None:
    from benchmarks import plot

    print(report.render(results))
    plot.save(results, picture)


def write(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps(results, indent=1))
    path.with_suffix(".tmp").replace(path)
    show(results, path.with_suffix(".png"))
    print(f"\nwritten: {path} and {path.with_suffix('.png').name}")


def main() -> int:
    options = parse(sys.argv[1:])
    if options.show:
        show(json.loads(options.show.read_text()), options.show.with_suffix(".png"))
        return 0
    # A polite kill ends the jobs in order, as Ctrl-C does; a shell's background job starts with Ctrl-C ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    started = time.strftime("%Y%m%d-%H%M%S")
    results = begin(options)
    try:
        with tempfile.TemporaryDirectory(prefix="hvdvars-bench-") as folder:
            measure(options, Path(folder), results)
        code = 1 if report.failures(results) else 0
    except KeyboardInterrupt:
        print("\ninterrupted: all jobs ended; what was complete by then follows", file=sys.stderr)
        code = 130
    if results["series"] or results["memory"]:
        write(results, options.output / f"{started}.json")
    return code


if __name__ == "__main__":
    sys.exit(main())
