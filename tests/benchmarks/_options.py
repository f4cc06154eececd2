"""The command line of benchmarks whose one option is `--full`."""

import argparse


def asks_for_all_repetitions(description: str | None) -> bool:
    """Parse the command line; whether it has `--full`. With `--help`, or with what is not known, the process ends."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="run all repetitions; this can take hours")
    return bool(parser.parse_args().full)
